"""Engine facts: what the engine's memory holds and how fast it is, said once when it is ready.

Runs in the engine's process, without importing torch.
"""

from __future__ import annotations

import secrets
import time
from typing import Any

from msgspec import Struct

from specdec.limits import NO_LIMITS, SpeculationLimits
from specdec.params import SamplingParams
from specdec.request import Request

TEST_S = 0.8  # of each of the two runs; with prompts and the last steps about 2 s in all
MIN_TOKENS = 8  # fewer tell nothing
TEST_TEXT = (  # about 64 tokens
    "Monday: milk, bread, eggs. Tuesday: milk, bread, rice. Wednesday: milk, bread, eggs. "
    "Thursday: milk, bread, rice. Friday: milk, bread, eggs. Saturday: milk, bread, rice. "
    "Sunday: milk,"
)


class SelfTest(Struct):
    """Tokens per second of one stream, greedy, going on with a list that repeats itself."""

    plain: float
    speculative: float

    @property
    def speed_up(self) -> float:
        return self.speculative / self.plain


class EngineFacts(Struct):
    """Sizes are in bytes, of the KV cache in blocks of `block_size` tokens."""

    weight_bytes: int
    drafter_bytes: int
    num_blocks: int
    block_size: int
    block_bytes: int
    self_test: SelfTest | None = None  # not asked for, or it showed nothing


def engine_facts(engine: Any, *, is_tested: bool) -> EngineFacts | None:
    """The facts of a `specdec.engine.Engine`; of another, such as a test's, nothing is known.

    Example: `engine_facts(engine, is_tested=False).num_blocks`.
    """
    if not hasattr(engine, "pool"):
        return None
    model, config, pool = engine.loaded.model, engine.config, engine.pool
    return EngineFacts(
        weight_bytes=model.weight_bytes,
        drafter_bytes=engine.drafter.num_bytes,
        num_blocks=pool.num_blocks,
        block_size=config.block_size,
        block_bytes=model.kv_bytes_per_block(config.kv, config.block_size),
        self_test=self_test(engine) if is_tested else None,
    )


def self_test(engine: Any) -> SelfTest | None:
    """Measure it, or None for a model without text and for one too slow to tell in 2 s."""
    tokenizer = engine.loaded.tokenizer
    if tokenizer is None:
        return None
    prompt_ids = tuple(tokenizer.encode(TEST_TEXT))
    if len(prompt_ids) + 2 * MIN_TOKENS > engine.max_model_len:
        return None
    rates = [
        _tokens_per_s(engine, prompt_ids, limits)
        for limits in (SpeculationLimits(max_nodes=0), NO_LIMITS)
    ]
    engine.forget_counts()
    if not all(rates):
        return None
    return SelfTest(*rates)


def _tokens_per_s(engine: Any, prompt_ids: tuple[int, ...], limits: SpeculationLimits) -> float:
    """Of one stream after its first token; 0.0 where too few came in time."""
    request = Request(
        "self-test",
        prompt_ids,
        SamplingParams(max_tokens=engine.max_model_len, temperature=0.0, ignore_eos=True),
        cache_salt=secrets.token_hex(16),  # nobody finds its blocks
        speculation=limits,
    )
    engine.add(request)
    while not (request.output or request.is_finished):
        engine.step()
    num_before, started = len(request.output), time.perf_counter()
    seconds = 0.0
    while not request.is_finished and seconds < TEST_S:
        engine.step()
        seconds = time.perf_counter() - started
    num_tokens = len(request.output) - num_before
    engine.abort(request.request_id)
    while engine.has_work:
        engine.step()
    return num_tokens / seconds if num_tokens >= MIN_TOKENS else 0.0
