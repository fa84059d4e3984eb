"""Guesses ranked by the request's own noise go with the coupled rule alone."""

from __future__ import annotations

import pytest
import torch
from scipy import stats

from specdec.config import EngineConfig, Verification
from specdec.engine import Engine
from specdec.noise import gumbel_all
from specdec.params import SamplingParams
from specdec.sampling import Sampler
from specdec.tree import DraftTree
from specdec.verification import verify
from tests.drafters.toy_drafters import toy_drafters
from tests.toy import toy_model

P_TARGET = (0.5, 0.3, 0.2)
P_DRAFT = torch.tensor((0.2, 0.2, 0.6))
DRAWS = 4000


def p_value(rule: Verification, *, uses_noise: bool) -> float:
    """How well first tokens of many seeds fit the target's distribution (chi-squared)."""
    logits = torch.tensor([P_TARGET, P_TARGET]).log()
    counts = [0, 0, 0]
    for seed in range(DRAWS):
        sampler = Sampler(SamplingParams(temperature=1.0), (1,), seed=seed, eos_token_ids=())
        scores = P_DRAFT.log()
        if uses_noise:
            scores = scores + gumbel_all(seed, sampler.position(()), 3, logits.device)
        guess = int(scores.argmax())
        tree = DraftTree.from_paths(1, [[guess]], source="x", node_budget=1)
        counts[verify(rule, tree, logits, sampler, ()).token_ids[0]] += 1
    return float(stats.chisquare(counts, [DRAWS * share for share in P_TARGET]).pvalue)


def test_only_the_coupled_rule_may_know_the_noise() -> None:
    """After a rejection the rule of p/q draws with the noise that made the guess a poor one."""
    assert p_value("coupled", uses_noise=True) > 1e-3
    assert p_value("rejection", uses_noise=False) > 1e-3
    assert p_value("rejection", uses_noise=True) < 1e-6


@pytest.mark.parametrize(
    ("rule", "uses_noise"), [("coupled", True), ("rejection", False), ("typical", False)]
)
def test_the_engine_tells_drafters(rule: Verification, uses_noise: bool) -> None:
    loaded = toy_model()
    config = EngineConfig(verification=rule, control="fixed", backend="torch", kv_memory_mib=4)
    engine = Engine(config, loaded=loaded, drafter=toy_drafters("suffix,medusa", loaded))
    assert [drafter.uses_noise for drafter in engine.drafter.drafters] == [uses_noise] * 2
