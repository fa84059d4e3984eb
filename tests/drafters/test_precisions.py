"""Trained drafters work beside targets of every precision: no faults, and the same answers."""

from __future__ import annotations

import pytest

from specdec.errors import UsageError
from specdec.params import SamplingParams
from specdec.request import Request
from tests.drafters.toy_drafters import toy_drafters
from tests.toy import Form, default_form, run_all, toy_engine

FORMS = [
    Form("torch", "bf16"),
    Form("native", "bf16"),
    Form("native", "int8"),
    Form("native", "int4"),
]


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("names", ["medusa", "small-model", "suffix,medusa"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_trained_drafters_beside_a_target(form: Form, names: str, temperature: float) -> None:
    params = SamplingParams(max_tokens=24, temperature=temperature, seed=5, ignore_eos=True)
    try:
        with default_form(form):
            plain, drafted = Request("p", (1, 2, 3), params), Request("d", (1, 2, 3), params)
            run_all(toy_engine(), [plain])
            engine = toy_engine(drafter=toy_drafters(names), node_budget=8)
            run_all(engine, [drafted])
    except UsageError as reason:
        pytest.skip(str(reason))
    assert drafted.output_ids == plain.output_ids
    assert not engine.drafter.num_faults and not drafted.stats.disabled_drafters
    assert drafted.stats.num_draft_tokens > 0
