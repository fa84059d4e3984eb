"""serve: run the server until a signal ends it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
from collections.abc import Awaitable, Generator, Sequence
from functools import partial
from pathlib import Path

import uvicorn

from specdec.config import EngineConfig
from specdec.errors import UsageError
from specdec.server.announcement import announcement
from specdec.server.app import create_app
from specdec.server.connection import Connection
from specdec.server.engine_client import ENGINE_COMMAND
from specdec.server.gate import guarded
from specdec.server.messages import Ready
from specdec.server.service import Service
from specdec.server.settings import DEFAULTS, ServerSettings
from specdec.server.shadow import check_shadow
from specdec.server.stderr_lines import flush, say
from specdec.server.supervisor import Supervisor
from specdec.server.templates import TemplatePool
from specdec.tokenizer import Tokenizer

GOODBYE_S = 2.0  # how long the error events of those that did not make it may take
BACKLOG = 2048


def serve(
    config: EngineConfig,
    settings: ServerSettings = DEFAULTS,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    served_model_name: str | None = None,
    engine_command: Sequence[str] = ENGINE_COMMAND,
) -> None:
    """Serve a model over HTTP; returns after SIGTERM or SIGINT.

    On the first signal new requests get 503 and running ones have `settings.grace_s` seconds to
    finish; what is left then, or at a second signal, ends with an error event. Port 0 takes a free
    one.
    Once the model is loaded stderr has the line `ready: URL (model NAME, drafter NAMES)` and some
    more about it, each indented; before that /health answers 503.

    Raises UsageError when the address cannot be used or settings exclude each other, and what kept
    the engine from starting.
    Example: `serve(EngineConfig(drafter="ngram"), port=8000)`.
    """
    if not (served_model_name or "x").isprintable() or served_model_name == "":
        raise UsageError("served model name must be printable and not empty")
    check_shadow(settings.shadow, config)
    logging.getLogger("asyncio").addFilter(_is_news)
    with bind(host, port) as listener:
        name = served_model_name or config.model
        try:
            asyncio.run(_serve(config, settings, listener, name, engine_command))
        finally:
            flush()


def _is_news(record: logging.LogRecord) -> bool:
    """False for what asyncio says when a client has gone while events were written for it."""
    return record.msg != "socket.send() raised exception."


def bind(host: str, port: int) -> socket.socket:
    """A bound socket for the address; raises UsageError with one line on why it cannot be."""
    if not 0 <= port <= 65535:
        raise UsageError(f"port must be between 0 and 65535, not {port}")
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise UsageError(f"cannot listen on host {host!r}: {_reason(error)}") from None
    listener = socket.socket(family, kind, proto)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        reason = f"cannot listen on {host}:{port}: {_reason(error)}"
        raise UsageError(f"{reason}; choose another with --port") from None
    return listener


def _reason(error: Exception) -> str:
    strerror = error.strerror if isinstance(error, OSError) else None
    return (strerror or str(error)).lower()


class _Server(uvicorn.Server):
    """uvicorn without its signal handling, which knows no grace and ends with the signal."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class _Signals:
    """The first and the second request to end."""

    def __init__(self) -> None:
        self.first, self.second = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._take)

    def _take(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


async def _serve(
    config: EngineConfig,
    settings: ServerSettings,
    listener: socket.socket,
    served_model_name: str,
    engine_command: Sequence[str],
) -> None:
    signals = _Signals()
    engine = Supervisor(engine_command, hang_s=settings.hang_s)
    service = Service(engine, served_model_name, settings)
    server = _Server(
        uvicorn.Config(
            guarded(create_app(service), service),
            http=partial(Connection, settings=settings),  # type: ignore[arg-type]  # makes one
            ws="none",
            lifespan="off",
            h11_max_incomplete_event_size=settings.max_header_len,
            log_level="error",  # a client's mistakes are answered, and no news to who serves
            proxy_headers=False,  # anybody can send them, to be another address
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=int(GOODBYE_S),
        )
    )
    answering = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await engine.start(config, is_tested=settings.self_test)
        loading = asyncio.create_task(_load(service))
        await _first_of(loading, signals.first.wait(), answering)
        if loading.done():
            gc.freeze()  # what is loaded stays: collections need not look at it again
            say(announcement(_url(listener), config, loading.result(), service))
            await _first_of(signals.first.wait(), answering)
            await _drain(service, signals)
        loading.cancel()
    finally:
        service.is_draining = True
        server.should_exit = True
        await asyncio.gather(answering, engine.shutdown(), return_exceptions=True)
        if service.templates is not None:
            await service.templates.close()


async def _load(service: Service) -> Ready:
    ready = await service.engine.wait_ready()
    tokenizer = await asyncio.to_thread(Tokenizer.load, Path(ready.folder))
    service.templates = TemplatePool(tokenizer, service.settings, ready.max_model_len)
    await service.templates.start()
    service.tokenizer = tokenizer
    return ready


async def _drain(service: Service, signals: _Signals) -> None:
    service.is_draining = True
    if count := len(service.running):
        answers = "1 answer still runs" if count == 1 else f"{count} answers still run"
        say(f"stopping: {answers}; a second signal ends {'it' if count == 1 else 'them'} now")
    await _first_of(service.idle(), signals.second.wait(), asyncio.sleep(service.settings.grace_s))
    service.engine.fail_streams("the server is shutting down")
    await _first_of(service.idle(), asyncio.sleep(GOODBYE_S))


async def _first_of(*work: Awaitable[object]) -> None:
    """Wait for the first of these; coroutines that are not done by then are cancelled."""
    mine = [asyncio.ensure_future(item) for item in work]
    await asyncio.wait(mine, return_when=asyncio.FIRST_COMPLETED)
    for future, item in zip(mine, work, strict=True):
        if future is not item:
            future.cancel()


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
