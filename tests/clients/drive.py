"""Drive: runs a Python client's tasks, in that client's own environment, and prints what it saw.

    python drive.py openai_python/driver.py < tasks.jsonl > seen.jsonl

A driver defines `run(task, seen)`, which sends one request and fills `seen` as answers come, so
that what came before an error is kept. Standard library only.
"""

from __future__ import annotations

import json
import runpy
import sys
from typing import Any

Json = dict[str, Any]


def describe(error: Exception) -> Json:
    """An error by the attributes that the official client gives it and others keep."""
    return {
        "kind": type(error).__name__,
        "message": str(error),
        **{
            key: getattr(error, name, None)
            for key, name in {"status": "status_code", "code": "code", "param": "param"}.items()
        },
    }


def main() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # some clients print
    run = runpy.run_path(sys.argv[1])["run"]
    for line in sys.stdin:
        task = json.loads(line)
        seen: Json = {"texts": [], "finish": [], "deltas": []}
        try:
            run(task, seen)
        except Exception as error:  # whatever a client makes of an answer is what is to be seen
            seen["error"] = describe(error)
        print(json.dumps({"id": task["id"], "seen": seen}), file=answers, flush=True)


if __name__ == "__main__":
    main()
