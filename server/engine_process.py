"""The engine's own process: builds the engine, then steps it and talks to the server process.

Started by EngineClient as `python -m specdec.server.engine_process FD`, FD being one end of a
socket pair. It ends when it is told to, when the engine fails, and when the socket closes: at once
between two steps, and within `LEASH_S` seconds in the middle of a step or while it loads, so it
never outlives the server.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from specdec.config import EngineConfig
from specdec.errors import EngineStopped, InvalidRequest, SpecdecError
from specdec.out_of_memory import OUT_OF_MEMORY, is_out_of_memory
from specdec.request import Phase, Request, RequestOutput
from specdec.server.channel import Channel
from specdec.server.engine_facts import engine_facts
from specdec.server.fingerprint import fingerprint
from specdec.server.framing import encode_frame
from specdec.server.messages import (
    Abort,
    Alive,
    Count,
    Explain,
    Explanation,
    Failed,
    Output,
    Ping,
    Ready,
    Shutdown,
    Start,
    Submit,
    ToEngine,
    Tokens,
)

LEASH_S = 3.0  # after the server's end; engines write files when they close


class Explaining(Protocol):
    """What the engine process needs of a controller."""

    def explain(self) -> dict[str, Any]: ...


class SteppedEngine(Protocol):
    """What the engine process needs of an engine."""

    config: EngineConfig  # nothing left open
    reason: str  # how what was left open was settled, and why

    @property
    def loaded(self) -> Any: ...  # specdec.loading.LoadedModel, which would import torch here
    @property
    def controller(self) -> Explaining: ...
    def add(self, request: Request) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def step(self) -> list[RequestOutput]: ...
    def count(self) -> dict[str, Any]: ...
    @property
    def has_work(self) -> bool: ...
    def close(self) -> None: ...


def run(
    sock: socket.socket,
    build: Callable[[EngineConfig], SteppedEngine],
    measure: Callable[[SteppedEngine], float] = lambda engine: 0.0,
) -> int:
    """Serve one engine over the socket until it closes; returns the process's exit code.

    `measure` says how many seconds a step of the engine may take.
    """
    channel = Channel(sock)
    try:
        messages = channel.receive(is_blocking=True)
    except ValueError as error:  # also msgspec.DecodeError
        line = f"the server sent what cannot be read: {error}"
        channel.send(Failed(EngineStopped.__name__, line[:500]))
        return EngineStopped.exit_code
    if channel.is_closed or not messages or not isinstance(messages[0], Start):
        return EngineStopped.exit_code
    try:
        engine = build(messages[0].config)
        longest_step_s = measure(engine)  # overwrites the KV cache, so before any request
        channel.send(_ready(engine, messages[0], longest_step_s))
        _loop(engine, channel, messages[1:])
        engine.close()
    except SpecdecError as error:
        channel.send(Failed(type(error).__name__, str(error)))
        return error.exit_code
    except Exception as error:
        if is_out_of_memory(error):  # in the middle of a step: what it left behind is unknown
            channel.send(Failed(EngineStopped.__name__, OUT_OF_MEMORY))
            return EngineStopped.exit_code
        traceback.print_exc()  # a bug: the traceback is for us, the line for the user
        message = f"the engine failed: {type(error).__name__}: {error}".splitlines()[0]
        channel.send(Failed(EngineStopped.__name__, message[:500]))
        return EngineStopped.exit_code
    return 0


def _ready(engine: SteppedEngine, start: Start, longest_step_s: float) -> Ready:
    from specdec.checkpoints import resolve

    loaded, config = engine.loaded, engine.config
    return Ready(
        model_name=loaded.name,
        folder=str(resolve(config.model)),
        drafter=config.drafter,
        node_budget=config.node_budget or 0,
        reason=engine.reason,
        max_model_len=loaded.max_model_len,
        vocab_size=loaded.model.config.vocab_size,
        eos_token_ids=tuple(loaded.eos_token_ids),
        longest_step_s=longest_step_s,
        fingerprint=fingerprint(config),
        facts=engine_facts(engine, is_tested=start.is_tested),
    )


def _loop(engine: SteppedEngine, channel: Channel, messages: list[ToEngine]) -> None:
    queued: dict[str, Request] = {}
    while not channel.is_closed:
        answers = []
        for message in messages:
            if isinstance(message, Submit):
                answers.append(_submit(engine, message, queued))
            elif isinstance(message, Abort):
                engine.abort(message.request_id)
            elif isinstance(message, Explain | Count):
                channel.send(_explain(engine, message))
            elif isinstance(message, Ping):
                channel.send(Alive())
            elif isinstance(message, Shutdown):
                return
        if answers:
            channel.send(Tokens(answers))
        if engine.has_work:
            outputs = engine.step()
            _deliver(outputs, _begun(queued), channel)
        messages = channel.receive(is_blocking=not engine.has_work)


def _submit(engine: SteppedEngine, message: Submit, queued: dict[str, Request]) -> Output:
    request = Request(
        message.request_id,
        message.prompt_ids,
        message.params,
        priority=message.priority,
        cache_salt=message.cache_salt,
        speculation=message.speculation,
        prediction_ids=message.prediction_ids,
        keeps_rejected=message.keeps_rejected,
        is_shadow=message.is_shadow,
    )
    try:
        engine.add(request)
    except InvalidRequest as error:
        return Output(
            message.request_id,
            finish_reason="error",
            error=str(error),
            error_kind=type(error).__name__,
            error_param=error.param,
        )
    queued[message.request_id] = request
    return Output(message.request_id, seed=request.seed)


def _begun(queued: dict[str, Request]) -> list[Output]:
    """Tells of requests that wait no more, unless their tokens do; drops them from the queue."""
    begun = [request for request in queued.values() if request.phase is not Phase.WAITING]
    for request in begun:
        del queued[request.request_id]
    return [
        Output(request.request_id, has_begun=True)
        for request in begun
        if not (request.output or request.is_finished)
    ]


def _explain(engine: SteppedEngine, message: Explain | Count) -> Explanation:
    """The answer to a question; a bug in it ends the question and not the engine."""
    try:
        if isinstance(message, Count):
            facts = engine.count()
        else:
            facts = engine.controller.explain()
            decisions = facts["decisions"]
            newest = decisions[max(0, len(decisions) - message.max_decisions) :]
            facts = {**facts, "decisions": newest}
        answer = Explanation(message.question_id, facts)
        encode_frame(answer)  # what cannot travel is found here
    except Exception:
        traceback.print_exc()
        error = "the engine cannot explain itself; the server's log has the details"
        return Explanation(message.question_id, error=error)
    return answer


def _deliver(outputs: Sequence[RequestOutput], begun: list[Output], channel: Channel) -> None:
    if outputs or begun:
        channel.send(Tokens([*begun, *tokens_message(outputs).outputs]))


def tokens_message(outputs: Iterable[RequestOutput]) -> Tokens:
    """What is sent for the outputs of a step."""
    wire = [
        Output(
            output.request_id,
            tokens=list(output.tokens),
            finish_reason=output.finish_reason,
            error=output.error,
            error_kind=output.error_kind,
            stats=None if output.stats is None else output.stats.as_wire(),
            num_prefix_hit=output.num_prefix_hit,
            rejected=list(output.rejected),
        )
        for output in outputs
    ]
    return Tokens(wire)


def end_with_server(sock: socket.socket) -> None:
    """See to it that this process ends soon after the server, whatever it is doing then."""
    sock.set_inheritable(False)  # or what the engine starts would hold the server's end open
    threading.Thread(target=_outlast, args=(sock.fileno(),), daemon=True).start()


def _outlast(fd: int) -> None:
    poller = select.poll()
    poller.register(fd, 0)  # asks for nothing, so only a hang-up wakes it
    poller.poll()
    time.sleep(LEASH_S)
    os.kill(os.getpid(), signal.SIGKILL)


def _build(config: EngineConfig) -> SteppedEngine:
    from specdec.engine import Engine

    return Engine(config)


def _measure(engine: SteppedEngine) -> float:
    from specdec.engine import Engine
    from specdec.server.longest_step import longest_step_s

    assert isinstance(engine, Engine)
    return longest_step_s(engine)


def main(argv: list[str]) -> int:
    """Entry point of the engine process; the only argument is the socket's descriptor."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's to handle
    with socket.socket(fileno=int(argv[0])) as sock:
        end_with_server(sock)
        return run(sock, _build, _measure)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
