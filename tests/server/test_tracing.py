"""Traces: one span per answer, within the client's own trace, and nothing that a client wrote."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from specdec.server import tracing
from specdec.server.tracing import ENDPOINTS, TracingMiddleware, traced
from tests.server.open_request import hang_up, send
from tests.server.script import say

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from tests.server.conftest import RunningServer

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
Spans = list[dict[str, Any]]


def spans_of(app: ASGIApp, path: str, **headers: str) -> tuple[ReadableSpan, ...]:
    """What one request to an application leaves in the exporter."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": "POST", "path": path, "headers": raw}

    async def ignore(message: Message) -> None:
        pass

    async def read_nothing() -> Message:
        raise AssertionError("the application does not read")

    asyncio.run(TracingMiddleware(app, provider, "toy")(scope, read_nothing, ignore))
    return exporter.get_finished_spans()


def answering(status: int, media_type: str = "application/json") -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", media_type.encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"data: {}\n\n"})

    return app


@pytest.mark.parametrize(
    ("path", "name"),
    [("/v1/chat/completions", "chat toy"), ("/v1/completions", "text_completion toy")],
)
def test_a_span_says_what_was_asked_and_is_the_clients_child(path: str, name: str) -> None:
    traceparent = f"00-{TRACE}-{PARENT}-01"
    (span,) = spans_of(answering(200, "text/event-stream"), path, traceparent=traceparent)
    assert (span.name, span.kind) == (name, SpanKind.SERVER)
    assert span.parent is not None and span.context is not None
    assert f"{span.context.trace_id:032x}" == TRACE
    assert f"{span.parent.span_id:016x}" == PARENT
    attributes = dict(span.attributes or {})
    assert attributes.pop("gen_ai.response.time_to_first_chunk") > 0  # type: ignore[operator]  # an attribute may have other types
    assert attributes == {
        "gen_ai.operation.name": name.split()[0],
        "gen_ai.provider.name": "specdec",
        "gen_ai.request.model": "toy",
        "gen_ai.request.stream": True,
        "http.request.method": "POST",
        "http.route": path,
        "http.response.status_code": 200,
    }
    assert span.status.status_code is StatusCode.UNSET


@pytest.mark.parametrize("traceparent", ["", "00-zz-1-01", f"00-{TRACE}"])
def test_a_traceparent_that_is_none_begins_a_trace(traceparent: str) -> None:
    (span,) = spans_of(answering(200), "/v1/completions", traceparent=traceparent)
    assert span.parent is None


@pytest.mark.parametrize(("status", "is_error"), [(400, False), (429, False), (500, True)])
def test_an_error_of_ours_is_one_and_a_clients_mistake_is_not(status: int, is_error: bool) -> None:
    (span,) = spans_of(answering(status), "/v1/completions")
    assert (span.status.status_code is StatusCode.ERROR) == is_error
    assert (span.attributes or {})["error.type"] == str(status)


def test_what_generates_nothing_has_no_span() -> None:
    for path in ("/metrics", "/health", "/debug/load", "/v1/chat/completions/x"):
        assert not spans_of(answering(200), path)


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Spans]:
    """Spans that a collector of this process receives, as their names and attributes."""
    received: Spans = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                service = {
                    item.key: item.value.string_value for item in resource.resource.attributes
                }
                for span in (span for scope in resource.scope_spans for span in scope.spans):
                    values = {item.key: _plain(item.value) for item in span.attributes}
                    status = {"status": span.status.code, "service": service["service.name"]}
                    received.append({"name": span.name, **status, **values})
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    def _plain(value: Any) -> Any:
        kind = value.WhichOneof("value")
        if kind == "array_value":
            return [_plain(item) for item in value.array_value.values]
        return getattr(value, kind)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listener:
        threading.Thread(target=listener.serve_forever, daemon=True).start()
        monkeypatch.setenv(ENDPOINTS[1], f"http://127.0.0.1:{listener.server_port}")
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")  # milliseconds
        yield received
        listener.shutdown()


def test_a_server_exports_numbers_and_no_text(
    collector: Spans, own_server: Callable[..., RunningServer]
) -> None:
    server = own_server()
    server.wait_ready()
    fields = {"messages": say("a secret poem", burst=3), "max_tokens": 9, "seed": 4}
    answer = server.client.chat.completions.create(model="toy", n=2, **fields)
    server.eventually(lambda: len(collector) == 1)
    (span,) = collector
    assert (span["name"], span["service"]) == ("chat toy", "specdec")
    assert span["gen_ai.response.id"] == answer.id
    assert span["gen_ai.response.finish_reasons"] == ["length", "length"]
    assert span["gen_ai.usage.input_tokens"] == answer.usage.prompt_tokens
    assert span["gen_ai.usage.output_tokens"] == answer.usage.completion_tokens == 18
    assert (span["gen_ai.request.max_tokens"], span["gen_ai.request.seed"]) == (9, 4)
    assert (span["specdec.decode_steps"], span["specdec.accepted_tokens"]) == (6, 12)
    assert "gen_ai.response.time_to_first_chunk" not in span
    assert "secret" not in json.dumps(collector)

    connection = send(server, stream=True)
    received = b""
    while b"\ndata: " not in received:  # the head may come alone
        received += connection.recv(1000)
    assert received.startswith(b"HTTP/1.1 200")
    hang_up(connection, "close")
    server.eventually(lambda: len(collector) == 2)
    assert collector[1]["gen_ai.response.time_to_first_chunk"] > 0
    assert collector[1]["error.type"] == "unfinished"
    assert collector[1]["status"] == StatusCode.ERROR.value
    assert server.end() == ""


def test_without_the_extra_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    app = answering(200)
    monkeypatch.setenv(ENDPOINTS[1], "http://127.0.0.1:1")
    monkeypatch.setattr(tracing, "_is_installed", lambda module: False)
    assert traced(app, "toy") is app
    (line,) = capsys.readouterr().err.splitlines()
    assert 'pip install "specdec-server[traces]"' in line and ENDPOINTS[1] in line
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert traced(app, "toy") is app
    assert capsys.readouterr().err == ""


def test_who_wants_no_traces_loads_nothing_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ENDPOINTS:
        monkeypatch.delenv(name, raising=False)
    code = """
import sys
from specdec.server.gate import guarded
from specdec.server.tracing import traced
assert traced(guarded, "toy") is guarded
assert not [name for name in sys.modules if name.startswith("opentelemetry")]
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
