"""Prometheus: what the server and its engine have counted, as metric families.

A measure has one name. Where vLLM has a metric of the same meaning the name is vLLM's, so that
dashboards and load tools find it; what vLLM does not have begins with `specdec:`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, zip_longest
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from specdec.counters import STEP_BOUNDS_S, WAIT_BOUNDS_S, Histogram
from specdec.server.engine_totals import EngineTotals
from specdec.server.load_metrics import LoadMetrics
from specdec.server.shadow import WHY_DROPPED, Shadow

# Always the plain format, which every scraper reads: asked for OpenMetrics, the library would put
# an underscore for the colon of each name.
MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class PrometheusText:
    """The text that a Prometheus server scrapes.

    Example: `PrometheusText("my-model", load, totals).render()`.
    """

    def __init__(
        self,
        model_name: str,
        load: LoadMetrics,
        totals: EngineTotals,
        shadow: Shadow | None = None,
    ) -> None:
        # Of this server's own: the library's global one would mix the servers of one process.
        self._registry = CollectorRegistry()
        self._registry.register(_Load(model_name, load))
        self._registry.register(_Engine(model_name, totals))
        if shadow is not None:
            self._registry.register(_Shadow(model_name, shadow))
        ProcessCollector(registry=self._registry)

    def render(self) -> bytes:
        """The text, of MEDIA_TYPE."""
        return generate_latest(self._registry)


class _Families(Collector):
    """Makes families whose first label is the model's name, as vLLM's are."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name

    def _counter(self, name: str, text: str, value: float) -> Metric:
        return self._counters(name, text, (), [((), value)])

    def _counters(
        self,
        name: str,
        text: str,
        labels: Sequence[str],
        values: Iterable[tuple[Sequence[str], float]],
    ) -> Metric:
        family = CounterMetricFamily(name, text, labels=["model_name", *labels])
        for named, value in values:
            family.add_metric([self._model_name, *named], value)
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _histogram(
        self, name: str, text: str, bounds: Sequence[float], counted: Mapping[str, Any]
    ) -> Metric:
        family = HistogramMetricFamily(name, text, labels=["model_name"])
        limits = [*map(str, bounds), "+Inf"]
        buckets = list(zip(limits, accumulate(counted["counts"]), strict=True))
        family.add_metric([self._model_name], buckets, counted["sum"])
        return family


class _Load(_Families):
    def __init__(self, model_name: str, load: LoadMetrics) -> None:
        super().__init__(model_name)
        self._load = load

    def collect(self) -> Iterator[Metric]:
        load = self._load
        yield self._counters(
            "specdec:http_requests",
            "HTTP requests by route and status; 499 is a client that went away.",
            ("route", "status"),
            [((route, str(status)), n) for (route, status), n in load.http_requests.items()],
        )
        yield self._gauge("specdec:requests_queued", "Requests without a token.", load.num_queued)
        yield self._gauge("specdec:requests_running", "Requests with tokens.", load.num_running)
        yield self._counters(
            "vllm:request_success",
            "Finished requests by reason, those with error and abort too.",
            ("finished_reason",),
            [((r,), load.finished[r]) for r in ("stop", "length", "abort", "error")],
        )
        yield self._counter(
            "vllm:prompt_tokens", "Prompt tokens of requests with output.", load.num_prompt
        )
        yield self._counter("vllm:generation_tokens", "Output tokens.", load.num_output)
        for name, text, histogram in self._histograms():
            yield self._histogram(name, text, histogram.bounds, histogram.as_json())

    def _histograms(self) -> Iterable[tuple[str, str, Histogram]]:
        load = self._load
        return (
            ("vllm:time_to_first_token_seconds", "Arrival to first token.", load.first_token_s),
            (
                "vllm:inter_token_latency_seconds",
                "Between tokens: k tokens t seconds after those before are k times t / k.",
                load.inter_token_s,
            ),
            (
                "specdec:inter_step_latency_seconds",
                "Between the steps that bring a request tokens, however many.",
                load.inter_step_s,
            ),
            (
                "vllm:request_time_per_output_token_seconds",
                "A finished request's mean time between its tokens.",
                load.per_output_token_s,
            ),
            (
                "vllm:e2e_request_latency_seconds",
                "Arrival to end of a finished request.",
                load.end_to_end_s,
            ),
            ("vllm:request_prompt_tokens", "A finished request's prompt.", load.prompt_len),
            ("vllm:request_generation_tokens", "A finished request's output.", load.output_len),
        )


class _Shadow(_Families):
    def __init__(self, model_name: str, shadow: Shadow) -> None:
        super().__init__(model_name)
        self._shadow = shadow

    def collect(self) -> Iterator[Metric]:
        shadow = self._shadow
        yield self._counter(
            "specdec:shadow_checked",
            "Answers compared with their repetition without speculation.",
            shadow.num_checked,
        )
        yield self._counter(
            "specdec:shadow_divergences", "Of them with other tokens.", shadow.num_divergences
        )
        yield self._counters(
            "specdec:shadow_dropped",
            "Answers chosen and not compared.",
            ("reason",),
            [((why,), shadow.dropped[why]) for why in WHY_DROPPED],
        )
        yield self._gauge("specdec:shadow_waiting", "Answers to be repeated.", shadow.num_waiting)
        yield self._counter(
            "specdec:shadow_tokens", "Output tokens of repetitions.", shadow.num_tokens
        )


class _Engine(_Families):
    def __init__(self, model_name: str, totals: EngineTotals) -> None:
        super().__init__(model_name)
        self._totals = totals

    def collect(self) -> Iterator[Metric]:
        engine = self._totals
        yield self._gauge(
            "specdec:engine_up", "Whether the engine answered just now.", float(engine.is_up)
        )
        yield self._counter(
            "specdec:engine_restarts", "Engines that were replaced.", engine.engine.num_restarts
        )
        if engine.now:
            yield from self._holdings(engine.now)
        if engine.totals:
            yield from self._steps(engine.totals)
            yield from self._cache(engine.totals)
            yield from self._speculation(engine.totals)

    def _holdings(self, now: Mapping[str, int]) -> Iterator[Metric]:
        yield self._gauge(
            "vllm:num_requests_running", "Requests that the scheduler runs.", now["num_running"]
        )
        yield self._gauge(
            "vllm:num_requests_waiting", "Requests that it has queued.", now["num_waiting"]
        )
        yield self._gauge("specdec:kv_blocks", "Blocks of the KV cache.", now["num_blocks"])
        yield self._gauge("specdec:kv_blocks_held", "Blocks in use.", now["num_held_blocks"])
        yield self._gauge(
            "vllm:kv_cache_usage_perc",
            "Share of the blocks in use, 0 to 1.",
            now["num_held_blocks"] / now["num_blocks"],
        )

    def _steps(self, totals: Mapping[str, Any]) -> Iterator[Metric]:
        for name, text, key in (
            ("specdec:decode_steps", "Decode steps, one per request and step.", "num_decode_steps"),
            ("specdec:rows", "Query tokens of all forwards.", "num_rows"),
            ("specdec:prefill_tokens", "Query tokens of prefill chunks.", "num_prefill"),
            ("specdec:forward_seconds", "Packing, forward and verification.", "forward_s"),
            ("specdec:rest_seconds", "Planning, choosing and committing.", "rest_s"),
            ("vllm:num_preemptions", "Requests preempted for others.", "num_preemptions"),
            ("vllm:corrupted_requests", "Requests with logits not finite.", "num_corrupted"),
        ):
            yield self._counter(name, text, totals[key])
        yield self._by_name("specdec:draft_seconds", "Drafting.", "drafter", totals["draft_s"])
        yield self._histogram(
            "specdec:step_seconds", "Whole steps.", STEP_BOUNDS_S, totals["step_s"]
        )
        yield self._histogram(
            "vllm:request_queue_time_seconds",
            "From the engine's acceptance to a request's first step.",
            WAIT_BOUNDS_S,
            totals["queue_s"],
        )

    def _cache(self, totals: Mapping[str, Any]) -> Iterator[Metric]:
        yield self._counter(
            "vllm:prefix_cache_queries", "Prompt tokens looked up.", totals["num_prompt"]
        )
        yield self._counter(
            "vllm:prefix_cache_hits", "Of them found cached.", totals["num_prefix_hit"]
        )

    def _speculation(self, totals: Mapping[str, Any]) -> Iterator[Metric]:
        for name, text, key in (
            ("vllm:spec_decode_num_drafts", "Decode steps with draft nodes.", "num_drafts"),
            ("vllm:spec_decode_num_draft_tokens", "Draft nodes.", "num_draft_tokens"),
            ("vllm:spec_decode_num_accepted_tokens", "Accepted ones.", "num_accepted"),
        ):
            yield self._counter(name, text, totals[key])
        positions = [
            ((str(position),), drafted, accepted)
            for position, (drafted, accepted) in enumerate(
                zip_longest(totals["drafted_at"], totals["accepted_at"], fillvalue=0)
            )
        ]
        yield self._counters(
            "specdec:spec_decode_num_draft_tokens_per_pos",
            "Draft nodes by depth less one; a tree has several at one.",
            ("position",),
            [(position, drafted) for position, drafted, _ in positions],
        )
        yield self._counters(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted nodes by depth less one.",
            ("position",),
            [(position, accepted) for position, _, accepted in positions],
        )
        for name, text, label, key in (
            ("specdec:drafted_tokens", "Draft nodes by source.", "drafter", "drafted_by"),
            ("specdec:accepted_tokens", "Accepted ones by source.", "drafter", "accepted_by"),
            ("specdec:drafter_faults", "Requests a drafter failed.", "drafter", "faults"),
            ("specdec:decisions", "Steps by why they draft so much.", "reason", "reasons"),
        ):
            yield self._by_name(name, text, label, totals[key])

    def _by_name(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        return self._counters(name, text, (label,), [((key,), n) for key, n in values.items()])
