"""An engine process whose engine says what its prompt asks for: the server without a model.

A prompt's last `[[...]]` holds directives in JSON and the text after it is the output, one token
per character byte: `[[{"burst": 3}]]Hello` yields "Hello" three tokens to a step. Directives:

    burst      tokens per step (1)
    delay_s    seconds per step (0)
    queue_s    seconds before it begins with the request (0)
    wait_s     seconds before the first token (0)
    die        "crash" (an exception), "kill" (SIGKILL), "stop" (SIGSTOP), "hang" (a step without
               end), "oom" (MemoryError), "exit" (code 7) or "request" (only this request fails)
    die_after  output tokens before that (0)
    refuse     message of the InvalidRequest that add() raises
    end        False leaves out the end-of-sequence token: the text repeats
    differs    place of an output token that is another one without speculation

What the engine is told goes to `journal.jsonl` in the model's folder. Other files there: `silent`
makes the controller fail to explain itself, `broken` keeps the engine from starting, `held` lets it
load until it is removed, `longest_step_s` holds the seconds that a step may take.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from specdec.config import AUTO, EngineConfig
from specdec.counters import EngineCounters
from specdec.decision import Decision, Reason
from specdec.errors import CheckpointError, ContextLengthExceeded, InvalidRequest
from specdec.request import Phase, Request, RequestOutput, TokenRecord
from specdec.server import engine_process
from specdec.text import StopMatcher
from specdec.tokenizer import Tokenizer

MAX_MODEL_LEN = 2048


class Script:
    """One request's tokens to come."""

    def __init__(self, request: Request, prompt: str, tokenizer: Tokenizer) -> None:
        head, _, self.text = prompt.rpartition("]]")
        self.text = self.text.removesuffix("\nassistant:").rstrip("\n")
        self.options: dict[str, Any] = json.loads(head.rpartition("[[")[2]) if head else {}
        self.request = request
        self.token_ids = tokenizer.encode(self.text, add_special_tokens=False)
        self.eos = () if self.options.get("end") is False else tokenizer.eos_token_ids
        self.begins_at = time.monotonic() + self.options.get("queue_s", 0)
        self.starts_at = self.begins_at + self.options.get("wait_s", 0)

    def token(self, position: int) -> int:
        if position < len(self.token_ids):
            return self.token_ids[position]
        return self.eos[0] if self.eos else self.token_ids[position % len(self.token_ids)]


class ScriptedController:
    """Explains steps that all went alike: one decision for each step with requests."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._decisions: list[Decision] = []

    def observe(self, num_requests: int) -> None:
        self._decisions.append(
            Decision(
                step=len(self._decisions),
                reason=Reason.SPECULATE,
                num_requests=num_requests,
                num_candidates=7,
                num_nodes=5,
                num_rows=num_requests + 5,
                predicted_tokens=3.0 * num_requests,
                predicted_s=0.02,
                plain_s=0.01,
                decide_s=0.000021,
                observed_tokens=num_requests,
                observed_s=0.02,
            )
        )

    def explain(self) -> dict[str, Any]:
        if (self._folder / "silent").exists():
            raise RuntimeError("the script says so")
        return {
            "control": "adaptive",
            "speed_up": 1.42,
            "reasons": {"speculate": len(self._decisions), "off": 3},
            "decisions": [decision.as_json() for decision in self._decisions],
            "cost": {"forwards": [{"requests": 1, "rows_ms": {"1": 9.0, "8": 18.0}}]},
        }


def settled(config: EngineConfig) -> EngineConfig:
    """As an engine settles what is left open."""
    drafter = "prediction,suffix" if config.drafter == AUTO else config.drafter
    return replace(config, drafter=drafter, node_budget=config.node_budget or 16)


class ScriptedEngine:
    def __init__(self, config: EngineConfig) -> None:
        self.config, self.reason = settled(config), ""
        self.folder = Path(config.model)
        self._note("loading", pid=os.getpid())
        if (self.folder / "broken").exists():
            raise CheckpointError("the weights are broken; pull the model again")
        time.sleep(float(os.environ.get("SCRIPTED_LOAD_S", "0")))
        while (self.folder / "held").exists():
            time.sleep(0.01)
        tokenizer = Tokenizer.load(self.folder)
        self.loaded = SimpleNamespace(
            name="scripted",
            tokenizer=tokenizer,
            eos_token_ids=tokenizer.eos_token_ids,
            max_model_len=MAX_MODEL_LEN,
            model=SimpleNamespace(config=SimpleNamespace(vocab_size=tokenizer.vocab_size)),
        )
        self.controller = ScriptedController(self.folder)
        self._scripts: dict[str, Script] = {}
        self._aborted: list[RequestOutput] = []
        self._note("loaded", pid=os.getpid())

    @property
    def has_work(self) -> bool:
        return bool(self._scripts or self._aborted)

    def close(self) -> None:
        """Nothing outlives it."""

    def count(self) -> dict[str, Any]:
        """Its steps; it counts nothing else."""
        reasons = {"speculate": len(self.controller._decisions)}
        steps = {"num_steps": reasons["speculate"]}
        totals = {**EngineCounters().totals(()), **steps, "reasons": reasons, "faults": {}}
        now = dict.fromkeys(("num_running", "num_waiting", "num_blocks", "num_held_blocks"), 1)
        return {"instance": str(os.getpid()), "totals": totals, "now": now}

    def add(self, request: Request) -> None:
        prompt = self.loaded.tokenizer.decode(request.prompt_ids)
        if len(request.prompt_ids) + request.params.max_tokens > MAX_MODEL_LEN:
            raise ContextLengthExceeded("prompt and output do not fit", param="max_tokens")
        script = Script(request, prompt, self.loaded.tokenizer)
        if refusal := script.options.get("refuse"):
            raise InvalidRequest(refusal, param="prompt")
        if request.params.stop:
            request.stop_matcher = StopMatcher(self.loaded.tokenizer, request.params.stop)
        self._scripts[request.request_id] = script
        self._note(
            "add",
            id=request.request_id,
            seed=request.params.seed,
            used_seed=request.seed,
            is_shadow=request.is_shadow,
            speculation=asdict(request.speculation),
            priority=request.priority,
            cache_salt=request.cache_salt,
        )

    def abort(self, request_id: str) -> None:
        script = self._scripts.pop(request_id, None)
        if script is not None:
            script.request.finish("abort")
            self._aborted.append(RequestOutput(request_id, (), "abort"))
            self._note("abort", id=request_id, num_tokens=len(script.request.output))

    def step(self) -> list[RequestOutput]:
        outputs, self._aborted = self._aborted, []
        if self._scripts:
            self.controller.observe(len(self._scripts))
        time.sleep(max((s.options.get("delay_s", 0.0) for s in self._scripts.values()), default=0))
        for script in list(self._scripts.values()):
            if time.monotonic() >= script.begins_at:
                script.request.phase = Phase.RUNNING
            if time.monotonic() >= script.starts_at:
                outputs.append(self._advance(script))
        return outputs

    def _advance(self, script: Script) -> RequestOutput:
        request = script.request
        options = script.options
        if "die" in options and len(request.output) >= options.get("die_after", 0):
            end(options["die"])
            del self._scripts[request.request_id]
            return RequestOutput(request.request_id, (), "error", "logits are not finite")
        first = len(request.output)
        burst = options.get("burst", 1)
        for depth in range(burst):
            if request.is_finished:
                break
            token_id = script.token(len(request.output))
            is_plain = request.speculation.max_nodes == 0
            if is_plain and len(request.output) == options.get("differs"):
                token_id ^= 1
            sources = ("target",) if depth == burst - 1 else ("script",)
            record = TokenRecord(token_id, sources, depth + 1, request.stats.num_steps)
            if request.params.logprobs is not None:
                top = tuple((token_id + k, -0.5 - k) for k in range(request.params.logprobs))
                record = TokenRecord(
                    token_id, sources, record.depth, record.step, -0.5, top_logprobs=top
                )
            request.append(record, self.loaded.eos_token_ids)
        tokens = tuple(request.output[first:])
        request.stats.observe_step((("script",),) * (burst - 1), (("script",),) * (len(tokens) - 1))
        if not request.is_finished:
            return RequestOutput(request.request_id, tokens)
        del self._scripts[request.request_id]
        self._note("finish", id=request.request_id)
        reason = request.finish_reason
        return RequestOutput(request.request_id, tokens, reason, None, request.stats, 16)

    def seconds(self, name: str, default: float = 0.0) -> float:
        """What a file in the model's folder says."""
        file = self.folder / name
        return float(file.read_text()) if file.exists() else default

    def _note(self, what: str, **more: object) -> None:
        with (self.folder / "journal.jsonl").open("a") as journal:
            journal.write(json.dumps({"what": what, **more}) + "\n")


def end(how: str) -> None:
    """End the engine, in a way that only a request's failure does not."""
    if how == "crash":
        raise RuntimeError("the script says so")
    if how == "oom":
        raise MemoryError
    if how == "exit":
        sys.exit(7)
    if how == "hang":
        time.sleep(3600)
    signals = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
    if how in signals:
        os.kill(os.getpid(), signals[how])


def longest_step_s(engine: Any) -> float:
    return float(engine.seconds("longest_step_s"))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=int(sys.argv[1])) as sock:
        engine_process.end_with_server(sock)
        sys.exit(engine_process.run(sock, ScriptedEngine, longest_step_s))
