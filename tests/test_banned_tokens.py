"""A request that bans every token ends alone, with an error, at the same place with any draft."""

from __future__ import annotations

from typing import Any

import pytest

from specdec.config import Verification
from specdec.params import SamplingParams
from specdec.request import Request, RequestOutput
from tests.toy import TruthDrafter, run_all, toy_engine

TRUTH = [5, 5, 5]  # what BANS leave: three in a row, and then nothing
BANS: dict[str, Any] = {"allowed_token_ids": frozenset({5}), "bad_words": ((5, 5, 5, 5),)}


def outputs_of(outputs: list[RequestOutput], request_id: str) -> list[RequestOutput]:
    return [output for output in outputs if output.request_id == request_id]


@pytest.mark.parametrize("verification", ["coupled", "rejection", "typical"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_tokens_before_the_ban_are_those_of_plain_decoding(
    verification: Verification, temperature: float
) -> None:
    params = SamplingParams(max_tokens=20, temperature=temperature, seed=1, **BANS)
    for drafter in (None, TruthDrafter({"banned": [5] * 9}, 0, 1.0)):
        engine = toy_engine(drafter=drafter, verification=verification)
        neighbour = Request("neighbour", (1, 2), SamplingParams(max_tokens=12))
        outputs = run_all(engine, [Request("banned", (1, 2, 3), params), neighbour])
        mine = outputs_of(outputs, "banned")
        assert [t.token_id for output in mine for t in output.tokens] == TRUTH
        assert mine[-1].finish_reason == "error"
        assert mine[-1].error_kind == "InvalidRequest"
        assert "bad_words" in (mine[-1].error or "")
        assert len(neighbour.output) == 12
        assert neighbour.finish_reason == "length"
