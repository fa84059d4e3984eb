"""Summary: the figures of one level, under the names that vLLM's benchmark gives them."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any

import numpy as np

from specdec.evals.load.goals import Goals
from specdec.evals.load.load_run import LoadRun, Sent
from specdec.evals.load.server_counts import ServerCounts, client_counts, disagreement
from specdec.evals.report.intervals import mean_interval, proportion_interval, ratio_interval
from specdec.evals.report.spread import PERCENTS
from specdec.metrics import SpeculationStats

LISTS = ("input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times", "queue_times")
DETAILS = (*LISTS, "errors", "indices")

Level = Mapping[str, Any]  # as `summarize` makes it


@dataclass(frozen=True)
class Described:
    """What is said of every level alike; `price` is of an hour of the server."""

    model: str
    label: str
    endpoint_type: str
    burstiness: float
    goals: Goals | None = None
    price: float | None = None


def summarize(
    run: LoadRun, described: Described, server: ServerCounts | None = None
) -> dict[str, Any]:
    """All figures of a level, ready for JSON; a figure that could not be had is None.

    Times and lengths are of the counted requests; rates are over the level's time (LoadRun) and
    of all requests, so that streams which began before or end after it count with their share.
    `server` is what the server counted meanwhile. DETAILS have an entry per counted request.

    Example: `summarize(run, described)["p99_ttft_ms"]`.
    """
    counted = run.counted
    well = [one for one in counted if one.exchange.outcome == "ok"]
    outcomes = Counter(one.exchange.outcome for one in counted)
    level = run.level
    return {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": described.endpoint_type,
        "backend": described.endpoint_type,
        "label": described.label,
        "model_id": described.model,
        "tokenizer_id": None,
        "num_prompts": len(counted),
        "request_rate": "inf" if level.rate is None else level.rate,
        "burstiness": described.burstiness,
        "max_concurrency": level.concurrency,
        "duration": run.duration_s,
        "completed": outcomes["ok"],
        "failed": outcomes["error"],
        "overloaded": outcomes["overloaded"],
        "first_error": next(
            (one.exchange.error for one in counted if one.exchange.outcome == "error"), None
        ),
        "total_input_tokens": sum(one.exchange.num_prompt for one in well),
        "total_output_tokens": sum(one.exchange.num_output for one in well),
        **_rates(run, described, well),
        **_times(well),
        **_speculation(well),
        **(server.spec_decode() if server else {}),
        **_details(counted),
        "level": level.name,
        "load": level.load,
        "stopped": run.stopped,
        "num_sent": len(run.sent),
        "num_without_counts": sum(one.exchange.itls_s() is None for one in well),
        "prefix_hit_share": _share(
            [one.exchange.num_prefix_hit for one in well], [one.exchange.num_prompt for one in well]
        ),
        "client": _client(run),
        **_agreement(run, server),
        "intervals": _intervals(counted, well, described.goals),
    }


def by_label(levels: Sequence[Level]) -> dict[str, list[Level]]:
    """Levels of each series in rising order of load."""
    found: dict[str, list[Level]] = {}
    for level in sorted(levels, key=lambda level: float(level["load"])):
        found.setdefault(level["label"], []).append(level)
    return found


def unit(levels: Sequence[Level]) -> str:
    """What a load is counted in."""
    return "clients" if levels[0]["max_concurrency"] is not None else "requests per second"


def without_details(level: Mapping[str, Any]) -> dict[str, Any]:
    """A level's figures without the entries per request."""
    return {name: value for name, value in level.items() if name not in DETAILS}


def _rates(run: LoadRun, described: Described, well: Sequence[Sent]) -> dict[str, Any]:
    seconds = run.duration_s
    tokens = list(run.token_times())
    num_output = sum(count for _, count in tokens)
    num_prompt = num_ended = 0
    for one in run.sent:
        exchange = one.exchange
        if exchange.ttft_s is not None and run.is_within(exchange.sent_at + exchange.ttft_s):
            num_prompt += exchange.num_prompt
        num_ended += exchange.outcome == "ok" and run.is_within(one.end_at)
    by_second: defaultdict[int, float] = defaultdict(float)
    for at, count in tokens:
        by_second[math.floor(at - run.begin_at)] += count
    # A server that counts nothing leaves rates unknown, which is not none.
    is_told = any(one.exchange.num_output for one in well) or not well
    per_second = (num_output / seconds if seconds > 0 else 0.0) if is_told else None
    requests = num_ended / seconds if seconds > 0 else 0.0
    goodput = cost = None
    if described.goals is not None and is_told:
        good = sum(described.goals.is_met(one.exchange) for one in well)
        goodput = requests * good / len(well) if well else 0.0
    if described.price is not None and per_second:
        cost = described.price / (3600 * per_second) * 1e6
    return {
        "request_throughput": requests,
        "request_goodput": goodput,
        "output_throughput": per_second,
        "total_token_throughput": None
        if per_second is None
        else per_second + (num_prompt / seconds if seconds > 0 else 0.0),
        "max_output_tokens_per_s": max(by_second.values(), default=0.0) if is_told else None,
        "max_concurrent_requests": peak_concurrency(run.sent),
        "cost_per_million_output_tokens": cost,
    }


def peak_concurrency(sent: Sequence[Sent]) -> int:
    """Most requests under way at once; one that ends when another is sent is not with it."""
    events = [(one.exchange.sent_at, 1) for one in sent] + [(one.end_at, -1) for one in sent]
    now = peak = 0
    for _, change in sorted((round(at, 9), change) for at, change in events):
        now += change
        peak = max(peak, now)
    return peak


def _times(well: Sequence[Sent]) -> dict[str, Any]:
    exchanges = [one.exchange for one in well]
    ttfts = [(one, one.exchange.ttft_s) for one in well if one.exchange.ttft_s is not None]
    told = [gaps for exchange in exchanges if (gaps := exchange.itls_s()) is not None]
    return {
        **spread("ttft", [seconds for _, seconds in ttfts]),
        **spread("tpot", [s for exchange in exchanges if (s := exchange.tpot_s) is not None]),
        **spread("itl", [gap for gaps in told for gap in gaps]),
        **spread("e2el", [exchange.end_s for exchange in exchanges]),
        **spread("client_queue_time", [one.late_s for one in well]),
        **spread("ttft_including_client_queue", [one.late_s + s for one, s in ttfts]),
        **spread("e2el_including_client_queue", [one.late_s + one.exchange.end_s for one in well]),
    }


def spread(name: str, seconds: Sequence[float]) -> dict[str, float | None]:
    """Mean, median, deviation and percentiles in milliseconds; None each of nothing.

    Percentiles lie between the two nearest values, as in vLLM's benchmark, so that its figures and
    these can be held against each other.

    Example: `spread("ttft", [0.1, 0.3])["mean_ttft_ms"]` is 200.
    """
    ms = 1e3 * np.asarray(seconds, dtype=np.float64)
    figures: dict[str, Callable[..., Any]] = {
        f"mean_{name}_ms": np.mean,
        f"median_{name}_ms": np.median,
        f"std_{name}_ms": np.std,
        **{f"p{p}_{name}_ms": partial(np.percentile, q=p) for p in PERCENTS},
    }
    return {key: float(of(ms)) if len(ms) else None for key, of in figures.items()}


def _speculation(well: Sequence[Sent]) -> dict[str, Any]:
    """From the answers themselves: tokens per step over all decode steps."""
    total = SpeculationStats()
    for one in well:
        if one.exchange.stats is not None:
            total.add(one.exchange.stats)
    if not total.num_steps:
        return {"tokens_per_step": None, "acceptance_rate": None}
    rate = total.acceptance_rate if total.num_draft_tokens else None
    return {"tokens_per_step": total.tokens_per_step, "acceptance_rate": rate}


def _details(counted: Sequence[Sent]) -> dict[str, list[Any]]:
    """By request; like vLLM's, a request without an answer has zeros."""
    exchanges = [one.exchange for one in counted]
    return {
        "input_lens": [exchange.num_prompt for exchange in exchanges],
        "output_lens": [exchange.num_output for exchange in exchanges],
        "ttfts": [exchange.ttft_s or 0.0 for exchange in exchanges],
        "itls": [exchange.itls_s() or [] for exchange in exchanges],
        "latencies": [exchange.end_s for exchange in exchanges],
        "start_times": [exchange.sent_at for exchange in exchanges],
        "queue_times": [one.late_s for one in counted],
        "errors": [exchange.error for exchange in exchanges],
        "indices": [one.index for one in counted],
    }


def _client(run: LoadRun) -> dict[str, Any]:
    late = [one.late_s for one in run.counted]
    late_p99_s = float(np.percentile(late, 99)) if late else 0.0
    return {
        "lag_p50_ms": 1e3 * run.busy.lag_p50_s,
        "lag_p99_ms": 1e3 * run.busy.lag_p99_s,
        "lag_max_ms": 1e3 * run.busy.lag_max_s,
        "late_p99_ms": 1e3 * late_p99_s,
        "cpu_share": run.busy.cpu_share,
        "warning": run.busy.warning(late_p99_s),
    }


def _agreement(run: LoadRun, server: ServerCounts | None) -> dict[str, Any]:
    """What server and client counted of all that was sent in this level."""
    if server is None:
        return {"counted_by_server": None, "counted_by_client": None, "disagreement": None}
    client = client_counts(run.sent)
    return {
        "counted_by_server": server.as_json(),
        "counted_by_client": client.as_json(),
        "disagreement": disagreement(server, client),
    }


def _intervals(
    counted: Sequence[Sent], well: Sequence[Sent], goals: Goals | None
) -> dict[str, dict[str, float | None]]:
    """Of the figures that are means or shares over requests."""
    exchanges = [one.exchange for one in well]
    itls = [gaps for exchange in exchanges if (gaps := exchange.itls_s()) is not None]
    stats = [exchange.stats for exchange in exchanges if exchange.stats is not None]
    found = {
        "mean_ttft_ms": mean_interval(_ms([exchange.ttft_s for exchange in exchanges])),
        "mean_tpot_ms": mean_interval(_ms([exchange.tpot_s for exchange in exchanges])),
        "mean_itl_ms": ratio_interval([1e3 * sum(gaps) for gaps in itls], list(map(len, itls))),
        "mean_e2el_ms": mean_interval(_ms([exchange.end_s for exchange in exchanges])),
        "tokens_per_step": ratio_interval(
            [s.num_accepted + s.num_steps for s in stats], [s.num_steps for s in stats]
        ),
    }
    if goals is not None:
        good = sum(goals.is_met(exchange) for exchange in exchanges)
        found["good_share"] = proportion_interval(good, len(counted))
    return {name: interval.as_json() for name, interval in found.items() if interval is not None}


def _ms(seconds: Sequence[float | None]) -> list[float]:
    return [1e3 * value for value in seconds if value is not None]


def _share(parts: Sequence[int], wholes: Sequence[int]) -> float | None:
    return sum(parts) / sum(wholes) if sum(wholes) else None
