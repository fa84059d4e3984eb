"""ServerCounts: what a server says in /metrics about its requests, by vLLM's names."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from specdec.evals.load.load_run import Sent

_TIMES = {
    "ttft": "vllm:time_to_first_token_seconds",
    "itl": "vllm:inter_token_latency_seconds",
    "e2el": "vllm:e2e_request_latency_seconds",
}
_COUNTED = "vllm:generation_tokens_total"
_ENDED_WELL = ("stop", "length")


@dataclass(frozen=True)
class ServerCounts:
    """Since the server's start, or between two moments.

    `times` are sums in seconds and how many were added up, by name. `drafts`, `draft_tokens` and
    `accepted_tokens` are steps with draft nodes, the nodes, and the accepted ones.

    Example: `after.minus(before).output_tokens`.
    """

    requests: int
    prompt_tokens: int
    output_tokens: int
    times: dict[str, tuple[float, int]] = field(default_factory=dict)
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_at: tuple[int, ...] = ()  # by position from 0

    @classmethod
    def read(cls, text: str | None) -> ServerCounts | None:
        """Of a /metrics text; None of one that does not count tokens by these names."""
        sums: defaultdict[str, float] = defaultdict(float)
        accepted_at: Counter[int] = Counter()
        requests = 0.0
        try:
            families = list(text_string_to_metric_families(text or ""))
        except ValueError:
            return None
        for sample in (sample for family in families for sample in family.samples):
            sums[sample.name] += sample.value
            if sample.name == "vllm:request_success_total":
                requests += sample.value * (sample.labels.get("finished_reason") in _ENDED_WELL)
            if sample.name == "vllm:spec_decode_num_accepted_tokens_per_pos_total":
                accepted_at[int(sample.labels["position"])] += int(sample.value)
        if _COUNTED not in sums:
            return None
        return cls(
            requests=int(requests),
            prompt_tokens=int(sums["vllm:prompt_tokens_total"]),
            output_tokens=int(sums[_COUNTED]),
            times={
                name: (float(sums[f"{metric}_sum"]), int(sums[f"{metric}_count"]))
                for name, metric in _TIMES.items()
            },
            drafts=int(sums["vllm:spec_decode_num_drafts_total"]),
            draft_tokens=int(sums["vllm:spec_decode_num_draft_tokens_total"]),
            accepted_tokens=int(sums["vllm:spec_decode_num_accepted_tokens_total"]),
            accepted_at=tuple(accepted_at[n] for n in range(max(accepted_at, default=-1) + 1)),
        )

    def minus(self, before: ServerCounts) -> ServerCounts:
        """What came to it since."""
        earlier = (*before.accepted_at, *[0] * len(self.accepted_at))
        return ServerCounts(
            self.requests - before.requests,
            self.prompt_tokens - before.prompt_tokens,
            self.output_tokens - before.output_tokens,
            {
                name: (total - before.times[name][0], count - before.times[name][1])
                for name, (total, count) in self.times.items()
            },
            self.drafts - before.drafts,
            self.draft_tokens - before.draft_tokens,
            self.accepted_tokens - before.accepted_tokens,
            tuple(now - then for now, then in zip(self.accepted_at, earlier, strict=False)),
        )

    def spec_decode(self) -> dict[str, Any]:
        """The figures of speculation as vLLM's benchmark names and defines them; {} of none.

        The rate is accepted nodes over drafted ones, in percent; the length is 1 + accepted nodes
        per step that had draft nodes.
        """
        if not self.draft_tokens or not self.drafts:
            return {}
        return {
            "spec_decode_acceptance_rate": 100 * self.accepted_tokens / self.draft_tokens,
            "spec_decode_acceptance_length": 1 + self.accepted_tokens / self.drafts,
            "spec_decode_num_drafts": self.drafts,
            "spec_decode_draft_tokens": self.draft_tokens,
            "spec_decode_accepted_tokens": self.accepted_tokens,
            "spec_decode_per_position_acceptance_rates": [
                count / self.drafts for count in self.accepted_at
            ],
        }

    def as_json(self) -> dict[str, Any]:
        """Counts, and mean times in milliseconds."""
        means = {
            f"mean_{name}_ms": 1e3 * total / count
            for name, (total, count) in self.times.items()
            if count
        }
        return {
            "requests": self.requests,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            **means,
        }


def client_counts(sent: Sequence[Sent]) -> ServerCounts:
    """The same, as the client saw it: all requests, also those that are not counted."""
    exchanges = [one.exchange for one in sent]
    well = [exchange for exchange in exchanges if exchange.outcome == "ok"]
    ttfts = [exchange.ttft_s for exchange in exchanges if exchange.ttft_s is not None]
    itls = [gap for exchange in exchanges for gap in exchange.itls_s() or ()]
    ends = [exchange.end_s for exchange in well]
    return ServerCounts(
        requests=len(well),
        prompt_tokens=sum(exchange.num_prompt for exchange in exchanges),
        output_tokens=sum(exchange.num_output for exchange in exchanges),
        times={
            name: (sum(values), len(values))
            for name, values in (("ttft", ttfts), ("itl", itls), ("e2el", ends))
        },
    )


def disagreement(server: ServerCounts, client: ServerCounts) -> str | None:
    """One line if the server counted something else than the client; None if they agree."""
    names = ("requests", "prompt_tokens", "output_tokens")
    found = [
        f"{getattr(server, name)} {name.replace('_', ' ')} against {getattr(client, name)}"
        for name in names
        if getattr(server, name) != getattr(client, name)
    ]
    if not found:
        return None
    return (
        f"the server counted {', '.join(found)} of this client: others ask it too, or answers "
        "were cut off"
    )
