"""Tracing: a span for every answer, exported by OTLP where the standard variables say so."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specdec.server.caller import caller_in
from specdec.server.load_metrics import CLIENT_GONE

if TYPE_CHECKING:  # an extra: imported only when traces are asked for
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

    from specdec.server.generation import Generation

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
MISSING = (
    "warning: no traces: {} is set, but the extra that exports them is not installed; "
    'run `pip install "specdec-server[traces]"` or unset it'
)
_OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion"}


def traced(app: ASGIApp, model_name: str) -> ASGIApp:
    """The application with a span around each answer, if the environment asks for traces.

    Where to send them, a sampler, headers and the service's name are read from OpenTelemetry's own
    variables; the protocol is OTLP over HTTP. What is not exported yet is when the process exits.

    Example: `traced(app, "my-model")` is `app` itself unless OTEL_EXPORTER_OTLP_ENDPOINT is set.
    """
    asking = [name for name in ENDPOINTS if os.environ.get(name)]
    if not asking or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return app
    if not all(map(_is_installed, ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"))):
        print(MISSING.format(asking[0]), file=sys.stderr, flush=True)
        return app
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    named = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": "specdec"}
    provider = TracerProvider(resource=Resource.create(named))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return TracingMiddleware(app, provider, model_name)


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package that it would be in
        return False


class TracingMiddleware:
    """Makes a span of every request that generates, a child of the client's own if it sent one.

    Its attributes are those of OpenTelemetry's GenAI conventions where they exist, and never hold
    any text of the prompt or the answer. It ends with the last byte sent.

    Example: `TracingMiddleware(app, provider, "my-model")`.
    """

    def __init__(self, app: ASGIApp, provider: TracerProvider, model_name: str) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self.app = app
        self._tracer = provider.get_tracer("specdec.server")
        self._propagator = TraceContextTextMapPropagator()
        self._model_name = model_name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        operation = _OPERATIONS.get(scope["path"]) if scope["type"] == "http" else None
        if operation is None:
            await self.app(scope, receive, send)
            return
        started = time.perf_counter()
        status, is_stream, first_s = CLIENT_GONE, False, None

        async def send_and_see(message: Message) -> None:
            nonlocal status, is_stream, first_s
            if message["type"] == "http.response.start":
                status = message["status"]
                media_type = Headers(raw=message["headers"]).get("content-type", "")
                is_stream = media_type.startswith("text/event-stream")
            elif first_s is None and message.get("body"):
                first_s = time.perf_counter() - started
            await send(message)

        with self._start(scope, operation) as span:
            try:
                await self.app(scope, receive, send_and_see)
            finally:
                generation = caller_in(scope).generation
                span.set_attribute("http.response.status_code", status)
                span.set_attribute("gen_ai.request.stream", is_stream)
                if is_stream and first_s is not None:
                    span.set_attribute("gen_ai.response.time_to_first_chunk", first_s)
                if generation is not None:
                    span.set_attributes(_attributes(generation))
                _mark_failure(span, status, generation)

    def _start(self, scope: Scope, operation: str) -> Any:
        """The span as a context manager; ASGI has header names in lower case."""
        from opentelemetry.trace import SpanKind

        carrier = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        return self._tracer.start_as_current_span(
            f"{operation} {self._model_name}",
            context=self._propagator.extract(carrier),
            kind=SpanKind.SERVER,
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "specdec",
                "gen_ai.request.model": self._model_name,
                "http.request.method": scope["method"],
                "http.route": scope["path"],
            },
            record_exception=False,  # its message could quote the client
            set_status_on_exception=False,
        )


def _attributes(generation: Generation) -> dict[str, Any]:
    """What was asked for and what came of it, in numbers."""
    preparation, usage = generation.preparation, generation.usage
    found: dict[str, Any] = {
        "gen_ai.request.choice.count": preparation.num_choices,
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.prompt_tokens_details.cached_tokens,
        "gen_ai.response.finish_reasons": [
            choice.finish_reason or "error" for choice in preparation.choices
        ],
    }
    if preparation.submits:
        first = preparation.submits[0]
        params = first.params
        found["gen_ai.response.id"] = first.request_id.rpartition("-")[0]
        found["gen_ai.request.max_tokens"] = params.max_tokens
        found["gen_ai.request.temperature"] = params.temperature
        found["gen_ai.request.top_p"] = params.top_p
        if params.seed is not None:
            found["gen_ai.request.seed"] = params.seed
    for choice in preparation.choices:
        for name, key in (
            ("specdec.decode_steps", "num_spec_steps"),
            ("specdec.drafted_tokens", "num_draft_tokens"),
            ("specdec.accepted_tokens", "num_accepted_draft_tokens"),
        ):
            if choice.stats is not None:
                found[name] = found.get(name, 0) + choice.stats[key]
    return found


def _mark_failure(span: Span, status: int, generation: Generation | None) -> None:
    """Give the span an error's status where the answer is not whole."""
    from opentelemetry.trace import StatusCode

    is_whole = generation is None or all(
        choice.finish_reason for choice in generation.preparation.choices
    )
    if status >= 400 or not is_whole:
        span.set_attribute("error.type", str(status) if status >= 400 else "unfinished")
    if status >= 500 or not is_whole:
        span.set_status(StatusCode.ERROR)
