"""Generation: the speed that it says is that of the tokens after the first step."""

from __future__ import annotations

from specdec.generation import Generation
from specdec.metrics import SpeculationStats
from specdec.request import TokenRecord


def generation(num_tokens: int, num_first: int) -> Generation:
    tokens = (TokenRecord(1, ("target",), 1, 0),) * num_tokens
    stats = SpeculationStats()
    return Generation(
        "x", tokens, "stop", 3, 0, stats, 0, ttft_s=1.0, total_s=5.0, num_first=num_first
    )


def test_speed_is_of_the_tokens_after_the_first_step_over_their_time() -> None:
    assert generation(10, 2).decode_tokens_per_second == 2.0
    assert generation(2, 2).decode_tokens_per_second is None
    assert generation(10, 2).as_json()["timings"]["decode_tokens_per_second"] == 2.0
