// Driver of the AI SDK with its OpenAI-compatible provider: generateText and streamText.
"use strict";
const { createOpenAICompatible } = require("@ai-sdk/openai-compatible");
const { APICallError, RetryError, generateText, streamText } = require("ai");

globalThis.AI_SDK_LOG_WARNINGS = false; // it writes them on stdout
const CANCEL_MS = 500; // of a request that is not streamed

async function run(task, seen) {
  const { model, messages, max_tokens, temperature, seed, stop, ...others } = task.body;
  const provider = createOpenAICompatible({
    name: "toy",
    baseURL: task.url,
    apiKey: task.key,
    includeUsage: task.usage,
  });
  const call = {
    model: provider.chatModel(model),
    messages,
    allowSystemInMessages: true,
    maxOutputTokens: max_tokens,
    temperature,
    seed,
    stopSequences: stop,
    maxRetries: task.retries,
    providerOptions: { toy: { ...others, ...task.extra } },
  };
  await (task.mode === "generateText" ? generate : stream)(call, task, seen);
}

async function generate(call, task, seen) {
  const abortSignal = task.cancels ? AbortSignal.timeout(CANCEL_MS) : undefined;
  try {
    const result = await generateText({ ...call, abortSignal });
    seen.texts = [result.text];
    seen.finish = [result.finishReason];
    takeUsage(result.usage, result.providerMetadata, seen);
    takeLogprobs(result.response.body.choices[0], seen);
  } catch (error) {
    if (!(task.cancels && error.name === "TimeoutError")) throw error;
  }
}

async function stream(call, task, seen) {
  const aborting = new AbortController();
  const errors = [];
  const result = streamText({
    ...call,
    abortSignal: aborting.signal,
    includeRawChunks: true,
    onError: ({ error }) => errors.push(error),
  });
  for await (const part of result.fullStream) {
    if (part.type === "text-delta") {
      seen.deltas.push(part.text);
      seen.texts = [seen.deltas.join("")];
      if (task.cancels) aborting.abort();
    } else if (part.type === "raw" && part.rawValue?.choices?.[0]) {
      takeLogprobs(part.rawValue.choices[0], seen);
    } else if (part.type === "finish-step" && part.finishReason !== "error") {
      seen.texts = [seen.deltas.join("")];
      seen.finish = [part.finishReason];
      takeUsage(part.usage, part.providerMetadata, seen);
    }
  }
  if (errors.length) throw errors[0];
}

function takeUsage(usage, metadata, seen) {
  if (usage.inputTokens !== undefined) {
    seen.usage = [usage.inputTokens, usage.outputTokens, usage.totalTokens];
  }
  const { acceptedPredictionTokens, rejectedPredictionTokens } = metadata.toy;
  if (acceptedPredictionTokens !== undefined) {
    seen.prediction = [acceptedPredictionTokens, rejectedPredictionTokens];
  }
}

function takeLogprobs(choice, seen) {
  for (const { token, logprob, top_logprobs } of choice.logprobs?.content ?? []) {
    const top = top_logprobs.map((other) => [other.token, other.logprob]);
    (seen.logprobs ??= []).push({ token, logprob, top });
  }
}

// An HTTP error keeps the body it came with; one in a stream is the body's `error` itself.
function describe(error) {
  const last = RetryError.isInstance(error) ? error.lastError : error;
  const told = APICallError.isInstance(last) ? last.data?.error : last;
  return {
    kind: last.constructor.name,
    message: String(last.message),
    status: last.statusCode,
    code: told?.code,
    param: told?.param,
  };
}

module.exports = { run, describe };
