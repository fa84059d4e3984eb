"""An engine process whose engine is real, and proves after every step that no block is lost.

It writes what it was told to `journal.jsonl` in the model's folder, as the scripted engine does,
and with each `step` how many blocks are held and how many requests it knows.
"""

from __future__ import annotations

import json
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path

from specdec.config import EngineConfig
from specdec.engine import Engine
from specdec.request import Request, RequestOutput
from specdec.server import engine_process

KV_MIB = 4  # so few blocks that the proof takes little time


class CheckedEngine(Engine):
    def __init__(self, config: EngineConfig) -> None:
        super().__init__(replace(config, kv_memory_mib=KV_MIB))
        self.folder = Path(config.model)

    def add(self, request: Request) -> None:
        super().add(request)
        self._note("add", id=request.request_id)

    def abort(self, request_id: str) -> None:
        super().abort(request_id)
        self._check()
        self._note("abort", id=request_id)

    def step(self) -> list[RequestOutput]:
        outputs = super().step()
        self._check()
        requests = self.scheduler.requests
        num_held = self.pool.num_blocks - self.pool.num_free
        self._note("step", num_held=num_held, num_requests=len(requests))
        return outputs

    def _check(self) -> None:
        self.pool.check([request.block_ids for request in self.scheduler.requests])

    def _note(self, what: str, **more: object) -> None:
        with (self.folder / "journal.jsonl").open("a") as journal:
            journal.write(json.dumps({"what": what, **more}) + "\n")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=int(sys.argv[1])) as sock:
        sys.exit(engine_process.run(sock, CheckedEngine))
