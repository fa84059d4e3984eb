"""The routes that count: /metrics for Prometheus and /debug/load for a page that looks often."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from specdec.server.engine_totals import EngineTotals
from specdec.server.json_response import json_response
from specdec.server.load_metrics import Recent
from specdec.server.prometheus import MEDIA_TYPE
from specdec.server.service import Service, service_of


async def _metrics(request: Request) -> Response:
    service = service_of(request)
    await service.totals.refresh()
    headers = {"Content-Type": MEDIA_TYPE, "Cache-Control": "no-store"}
    return Response(service.prometheus.render(), headers=headers)


async def _load(request: Request) -> Response:
    service = service_of(request)
    await service.totals.refresh()
    return json_response(load_facts(service), headers={"Cache-Control": "no-store"})


def load_facts(service: Service) -> dict[str, Any]:
    """How the server does: rates and percentiles of the last ten seconds, counts since its start.

    A figure of which nothing is known is null: rates of the engine need two looks within ten
    seconds, and percentiles a token. Times are in milliseconds, shares between 0 and 1.
    """
    load, totals = service.load, service.totals
    ready = service.engine.ready
    now = totals.now
    shadow = {} if service.shadow is None else {"shadow": service.shadow.as_json()}
    return {
        "uptime_s": round(load.uptime_s, 3),
        "engine_up": totals.is_up,
        "model": service.served_model_name,
        "drafters": ready.drafters if ready else [],
        "queued": load.num_queued,
        "running": load.num_running,
        "tokens_per_s": round(load.tokens_per_s(), 3),
        **_speculation(totals),
        "kv_used": round(now["num_held_blocks"] / now["num_blocks"], 4) if now else None,
        "num_steps": totals.totals.get("num_steps", 0),
        "step_ms": _ratio(totals, ("step_s", "sum"), ("num_steps",), 1000),
        "ttft_ms": _percentiles(load.recent_first_token_s),
        "itl_ms": _percentiles(load.recent_inter_token_s),
        "reasons": totals.totals.get("reasons", {}),
        "drafters_detail": _drafters(totals),
        **shadow,
    }


def _speculation(totals: EngineTotals) -> dict[str, Any]:
    return {
        "tokens_per_step": _ratio(totals, ("num_output",), ("num_decode_steps",)),
        "acceptance_rate": _ratio(totals, ("num_accepted",), ("num_draft_tokens",)),
        "prefix_hit_rate": _ratio(totals, ("num_prefix_hit",), ("num_prompt",)),
    }


def _percentiles(recent: Recent) -> dict[str, float | None]:
    p50, p99 = (None if s is None else round(1000 * s, 3) for s in recent.percentiles(0.5, 0.99))
    return {"p50": p50, "p99": p99}


def _ratio(
    totals: EngineTotals, over: tuple[str, ...], under: tuple[str, ...], scale: float = 1
) -> float | None:
    """One total's recent growth over another's; None where nothing happened or is known."""
    numerator, denominator = totals.lately(*over), totals.lately(*under)
    if numerator is None or not denominator:
        return None
    return round(scale * numerator / denominator, 4)


def _drafters(totals: EngineTotals) -> list[dict[str, Any]]:
    drafted, accepted = (totals.totals.get(key, {}) for key in ("drafted_by", "accepted_by"))
    return [
        {"name": name, "drafted": count, "accepted": accepted.get(name, 0)}
        for name, count in sorted(drafted.items())
    ]


ROUTES = [Route("/metrics", _metrics), Route("/debug/load", _load)]
