"""Generation: one request run to its end, with its text, counts and timings."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from specdec.engine import Engine
from specdec.errors import SpecdecError
from specdec.limits import NO_LIMITS, SpeculationLimits
from specdec.metrics import SpeculationStats
from specdec.params import SamplingParams
from specdec.request import Request, TokenRecord
from specdec.step_record import StepRecord
from specdec.text import TextStream

_numbers = count()

OnDelta = Callable[[str, TokenRecord | None], None]


@dataclass(frozen=True)
class Generation:
    """A finished generation. Times in seconds; `ttft_s` runs from submission to first delta."""

    text: str
    tokens: tuple[TokenRecord, ...]
    finish_reason: str
    num_prompt_tokens: int
    num_prefix_hit: int
    stats: SpeculationStats
    seed: int
    ttft_s: float
    total_s: float
    num_first: int  # tokens that came with the first step
    steps: tuple[StepRecord, ...] = ()  # if they were to be kept

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token.token_id for token in self.tokens)

    @property
    def decode_tokens_per_second(self) -> float | None:
        """Tokens after the first step by the time after it; None when one step was all."""
        rest = len(self.tokens) - self.num_first
        return rest / (self.total_s - self.ttft_s) if rest else None

    def as_json(self) -> dict[str, Any]:
        """What `specdec generate --json` prints."""
        speed = self.decode_tokens_per_second
        return {
            "text": self.text,
            "token_ids": list(self.token_ids),
            "finish_reason": self.finish_reason,
            "seed": self.seed,
            "usage": {
                "prompt_tokens": self.num_prompt_tokens,
                "completion_tokens": len(self.tokens),
                "total_tokens": self.num_prompt_tokens + len(self.tokens),
                "cached_tokens": self.num_prefix_hit,
            },
            "metrics": {"speculative_decoding": self.stats.as_wire()},
            "timings": {
                "ttft_s": round(self.ttft_s, 4),
                "total_s": round(self.total_s, 4),
                "decode_tokens_per_second": None if speed is None else round(speed, 2),
            },
            **self._logprobs(),
        }

    def _logprobs(self) -> dict[str, Any]:
        if not self.tokens or self.tokens[0].logprob is None:
            return {}
        return {
            "logprobs": [
                {"token_id": t.token_id, "logprob": t.logprob, "top": t.top_logprobs}
                for t in self.tokens
            ]
        }


def generate(
    engine: Engine,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    *,
    prediction_ids: Sequence[int] = (),
    speculation: SpeculationLimits = NO_LIMITS,
    keeps_steps: bool = False,
    on_delta: OnDelta | None = None,
) -> Generation:
    """Run one request to its end.

    `prediction_ids` is the text that is expected back, as far as the context reaches; the drafter
    "prediction" follows it. With `keeps_steps` every decode step has its record.
    `on_delta(text, token)` is called for every token, and once with None
    for the text held back at the end. Raises SpecdecError if the engine reports an error.

    Example:
        engine = Engine(EngineConfig())
        ids = engine.tokenizer.encode_chat([{"role": "user", "content": "Hello"}])
        print(generate(engine, ids, SamplingParams(max_tokens=32)).text)
    """
    request = Request(
        f"generate-{next(_numbers)}",
        tuple(prompt_ids),
        params,
        prediction_ids=tuple(prediction_ids[: engine.max_model_len]),
        speculation=speculation,
        keeps_steps=keeps_steps,
    )
    stream = TextStream(engine.tokenizer, params.stop, min_tokens=params.min_tokens)
    parts: list[str] = []

    def show(text: str, token: TokenRecord | None) -> None:
        parts.append(text)
        if on_delta is not None:
            on_delta(text, token)

    started = time.perf_counter()
    first: float | None = None
    num_first = 0
    engine.add(request)
    while not request.is_finished:
        for output in engine.step():
            for token in output.tokens:
                show(stream.push(token.token_id), token)
            if first is None and output.tokens:
                first, num_first = time.perf_counter(), len(output.tokens)
    show(stream.finish(), None)
    ended = time.perf_counter()
    if request.error is not None:
        raise SpecdecError(request.error)
    return Generation(
        text="".join(parts),
        tokens=tuple(request.output),
        finish_reason=str(request.finish_reason),
        num_prompt_tokens=len(request.prompt_ids),
        num_prefix_hit=request.num_prefix_hit,
        stats=request.stats,
        seed=request.seed,
        ttft_s=(first or ended) - started,
        total_s=ended - started,
        num_first=num_first,
        steps=tuple(request.steps),
    )
