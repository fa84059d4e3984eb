// Drive: runs a JavaScript client's tasks, in that client's own environment, and prints what it saw.
//
//     NODE_PATH=.../node_modules node drive.cjs openai_node/driver.cjs < tasks.jsonl > seen.jsonl
//
// A driver exports `run(task, seen)`, which sends one request and fills `seen` as answers come, so
// that what came before an error is kept, and `describe(error)`, which says what the error tells.
"use strict";
const path = require("node:path");
const readline = require("node:readline");

async function main() {
  const { run, describe } = require(path.resolve(process.argv[2]));
  for await (const line of readline.createInterface({ input: process.stdin })) {
    const task = JSON.parse(line);
    const seen = { texts: [], finish: [], deltas: [] };
    try {
      await run(task, seen);
    } catch (error) {
      seen.error = describe(error);
    }
    console.log(JSON.stringify({ id: task.id, seen }));
  }
}

main();
