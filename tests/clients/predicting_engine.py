"""A scripted engine that counts what it drafts as drafted from the prediction and notes top_k."""

from __future__ import annotations

import signal
import socket
import sys
from pathlib import Path

# Last on the path: the folders at the root must not hide packages of the same names.
sys.path.append(str(Path(__file__).resolve().parents[2]))

from specdec.request import Request, RequestOutput
from specdec.server import engine_process
from tests.server.scripted_engine import Script, ScriptedEngine


class PredictingEngine(ScriptedEngine):
    def add(self, request: Request) -> None:
        super().add(request)
        self._note("params", id=request.request_id, top_k=request.params.top_k)

    def _advance(self, script: Script) -> RequestOutput:
        output = super()._advance(script)
        stats = script.request.stats
        for counts in (stats.drafted_by_source, stats.accepted_by_source):
            counts["prediction"] = counts["script"]
        return output


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=int(sys.argv[1])) as sock:
        sys.exit(engine_process.run(sock, PredictingEngine))
