// Driver of the official Node client: whole, streamed and through `.stream()`.
"use strict";
const OpenAI = require("openai");

const CANCEL_MS = 500; // of a request that is not streamed

async function run(task, seen) {
  const client = new OpenAI({
    baseURL: task.url,
    apiKey: task.key,
    maxRetries: task.retries,
    timeout: 20_000,
  });
  const { completions } = client.chat;
  const fields = { ...task.body, ...task.extra };
  const options = task.usage ? { stream_options: { include_usage: true } } : {};
  if (task.mode === "create") {
    const signal = task.cancels ? AbortSignal.timeout(CANCEL_MS) : undefined;
    await unlessCancelled(task, async () =>
      takeWhole(await completions.create(fields, { signal }), seen),
    );
  } else if (task.mode === "create stream") {
    const chunks = await completions.create({ ...fields, ...options, stream: true });
    for await (const chunk of chunks) {
      takeChunk(chunk, seen);
      if (task.cancels && seen.deltas.length) break; // which aborts the request
    }
  } else {
    const stream = completions.stream({ ...fields, ...options });
    stream.on("chunk", (chunk) => {
      const choice = chunk.choices[0];
      if (choice?.index !== 0 || !choice.delta.content) return;
      seen.deltas.push(choice.delta.content);
      seen.texts = [seen.deltas.join("")];
      if (task.cancels) stream.abort();
    });
    await unlessCancelled(task, async () => takeWhole(await stream.finalChatCompletion(), seen));
  }
}

async function unlessCancelled(task, work) {
  try {
    await work();
  } catch (error) {
    if (!(task.cancels && error instanceof OpenAI.APIUserAbortError)) throw error;
  }
}

function takeWhole(answer, seen) {
  seen.texts = answer.choices.map((choice) => choice.message.content ?? "");
  seen.finish = answer.choices.map((choice) => choice.finish_reason);
  takeLogprobs(answer.choices[0], seen);
  takeUsage(answer.usage, seen);
}

function takeChunk(chunk, seen) {
  for (const choice of chunk.choices) {
    seen.texts[choice.index] ??= "";
    if (choice.delta.content) {
      seen.texts[choice.index] += choice.delta.content;
      if (choice.index === 0) seen.deltas.push(choice.delta.content);
    }
    takeLogprobs(choice, seen);
    if (choice.finish_reason !== null) seen.finish[choice.index] = choice.finish_reason;
  }
  takeUsage(chunk.usage, seen);
}

function takeUsage(usage, seen) {
  if (!usage) return;
  seen.usage = [usage.prompt_tokens, usage.completion_tokens, usage.total_tokens];
  const details = usage.completion_tokens_details;
  if (details) {
    seen.prediction = [details.accepted_prediction_tokens, details.rejected_prediction_tokens];
  }
}

function takeLogprobs(choice, seen) {
  for (const { token, logprob, top_logprobs } of choice.logprobs?.content ?? []) {
    const top = top_logprobs.map((other) => [other.token, other.logprob]);
    (seen.logprobs ??= []).push({ token, logprob, top });
  }
}

// A thrown value that is the client's own error says more than its message.
function describe(error) {
  const { status, code, param } = error;
  return { kind: error.constructor.name, message: String(error.message), status, code, param };
}

module.exports = { run, describe };
