"""The engine's own process: builds the engine, then steps it and talks to the server process.

Started by EngineClient as `python -m specdec.server.engine_process FD`, FD being one end of a
socket pair. It ends when it is told to, when the engine fails, and when the socket closes, so it
never outlives the server.
"""

from __future__ import annotations

import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from specdec.config import EngineConfig
from specdec.errors import EngineStopped, InvalidRequest, SpecdecError
from specdec.request import Request, RequestOutput
from specdec.server.messages import (
    HEADER_LEN,
    Abort,
    Explain,
    Explanation,
    Failed,
    Output,
    Ready,
    Shutdown,
    Start,
    Submit,
    ToEngine,
    Tokens,
    ToServer,
    decode_to_engine,
    encode_frame,
    frame_len,
)

RECEIVE_LEN = 2**16


class Explaining(Protocol):
    """What the engine process needs of a controller."""

    def explain(self) -> dict[str, Any]: ...


class SteppedEngine(Protocol):
    """What the engine process needs of an engine."""

    @property
    def loaded(self) -> Any: ...  # specdec.loading.LoadedModel, which would import torch here
    @property
    def controller(self) -> Explaining: ...
    def add(self, request: Request) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def step(self) -> list[RequestOutput]: ...
    @property
    def has_work(self) -> bool: ...
    def close(self) -> None: ...


class Channel:
    """The engine process's end of the socket: whole messages in and out."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._received = bytearray()
        self.is_closed = False

    def send(self, message: ToServer) -> None:
        """Write a message; a server that is gone closes the channel instead of raising."""
        try:
            self._sock.sendall(encode_frame(message))
        except (BrokenPipeError, ConnectionResetError):
            self.is_closed = True

    def receive(self, *, is_blocking: bool) -> list[ToEngine]:
        """Every message that has arrived; when blocking, at least one unless the channel closes."""
        messages = self._take()
        while not self.is_closed and (self._has_data() or (is_blocking and not messages)):
            try:
                data = self._sock.recv(RECEIVE_LEN)
            except ConnectionResetError:
                data = b""
            self.is_closed = not data
            self._received += data
            messages += self._take()
        return messages

    def _has_data(self) -> bool:
        return bool(select.select([self._sock], [], [], 0)[0])

    def _take(self) -> list[ToEngine]:
        messages = []
        while len(self._received) >= HEADER_LEN:
            end = HEADER_LEN + frame_len(self._received[:HEADER_LEN])
            if len(self._received) < end:
                break
            messages.append(decode_to_engine(bytes(self._received[HEADER_LEN:end])))
            del self._received[:end]
        return messages


def run(sock: socket.socket, build: Callable[[EngineConfig], SteppedEngine]) -> int:
    """Serve one engine over the socket until it closes; returns the process's exit code."""
    channel = Channel(sock)
    messages = channel.receive(is_blocking=True)
    if channel.is_closed or not messages or not isinstance(messages[0], Start):
        return EngineStopped.exit_code
    try:
        engine = build(messages[0].config)
        channel.send(_ready(engine, messages[0].config))
        _loop(engine, channel, messages[1:])
        engine.close()
    except SpecdecError as error:
        channel.send(Failed(type(error).__name__, str(error)))
        return error.exit_code
    except Exception as error:  # a bug: the traceback is for us, the line for the user
        traceback.print_exc()
        message = f"the engine failed: {type(error).__name__}: {error}".splitlines()[0]
        channel.send(Failed(EngineStopped.__name__, message[:500]))
        return EngineStopped.exit_code
    return 0


def _ready(engine: SteppedEngine, config: EngineConfig) -> Ready:
    from specdec.checkpoints import resolve

    loaded = engine.loaded
    return Ready(
        model_name=loaded.name,
        folder=str(resolve(config.model)),
        drafter=config.drafter,
        max_model_len=loaded.max_model_len,
        vocab_size=loaded.model.config.vocab_size,
        eos_token_ids=tuple(loaded.eos_token_ids),
    )


def _loop(engine: SteppedEngine, channel: Channel, messages: list[ToEngine]) -> None:
    while not channel.is_closed:
        answers = []
        for message in messages:
            if isinstance(message, Submit):
                answers.append(_submit(engine, message))
            elif isinstance(message, Abort):
                engine.abort(message.request_id)
            elif isinstance(message, Explain):
                channel.send(_explain(engine, message))
            elif isinstance(message, Shutdown):
                return
        if answers:
            channel.send(Tokens(answers))
        if engine.has_work:
            _deliver(engine.step(), channel)
        messages = channel.receive(is_blocking=not engine.has_work)


def _submit(engine: SteppedEngine, message: Submit) -> Output:
    request = Request(
        message.request_id,
        message.prompt_ids,
        message.params,
        priority=message.priority,
        cache_salt=message.cache_salt,
        speculation=message.speculation,
        prediction_ids=message.prediction_ids,
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
    return Output(message.request_id)


def _explain(engine: SteppedEngine, message: Explain) -> Explanation:
    """The answer to a question; a bug in it ends the question and not the engine."""
    try:
        facts = engine.controller.explain()
        decisions = facts["decisions"]
        newest = decisions[max(0, len(decisions) - message.max_decisions) :]
        answer = Explanation(message.question_id, {**facts, "decisions": newest})
        encode_frame(answer)  # what cannot travel is found here
    except Exception:
        traceback.print_exc()
        error = "the engine cannot explain itself; the server's log has the details"
        return Explanation(message.question_id, error=error)
    return answer


def _deliver(outputs: Sequence[RequestOutput], channel: Channel) -> None:
    if outputs:
        channel.send(tokens_message(outputs))


def tokens_message(outputs: Iterable[RequestOutput]) -> Tokens:
    """What is sent for the outputs of a step."""
    wire = [
        Output(
            output.request_id,
            tokens=list(output.tokens),
            finish_reason=output.finish_reason,
            error=output.error,
            stats=None if output.stats is None else output.stats.as_wire(),
            num_prefix_hit=output.num_prefix_hit,
        )
        for output in outputs
    ]
    return Tokens(wire)


def _build(config: EngineConfig) -> SteppedEngine:
    from specdec.engine import Engine

    return Engine(config)


def main(argv: list[str]) -> int:
    """Entry point of the engine process; the only argument is the socket's descriptor."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's to handle
    with socket.socket(fileno=int(argv[0])) as sock:
        return run(sock, _build)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
