// Stream: the server-sent events of a fetch response, as parsed JSON, until `[DONE]`.

export class Interrupted extends Error {}

// Yields the value of each event; throws Interrupted when the stream ends without `[DONE]`.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) throw new Interrupted("the connection ended in the middle of the answer");
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines.map((raw) => raw.replace(/\r$/, ""))) {
        if (line.startsWith("data:")) {
          data.push(line.slice(5).replace(/^ /, ""));
        } else if (line === "" && data.length) {
          const text = data.join("\n");
          data = [];
          if (text === "[DONE]") return;
          yield JSON.parse(text);
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // the reader may have left early; nothing is lost
  }
}
