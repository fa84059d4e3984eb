"""Out of memory: which errors mean it, and what a step without memory does to its requests."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specdec.engine import Engine
from specdec.out_of_memory import OUT_OF_MEMORY, is_out_of_memory
from specdec.params import SamplingParams
from specdec.request import Request
from tests.cache_contents import contents
from tests.toy import ALPHABET, TruthDrafter, check_pool, run_all, toy_engine

pytestmark = pytest.mark.usefixtures("backend")


def request(name: str, *prompt_ids: int) -> Request:
    return Request(name, prompt_ids, SamplingParams(max_tokens=30, ignore_eos=True))


def out_of_memory_at(engine: Engine, step: int, part: str, error: Exception) -> None:
    """The given part of the engine's next steps fails once, at that step."""
    owner: Any = {"forward": engine.runner, "verify": engine._verifier}[part]
    works, num_calls = getattr(owner, part), 0

    def fails(*args: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        result = works(*args)
        if num_calls == step:
            raise error
        return result

    setattr(owner, part, fails)


def test_errors_that_mean_it() -> None:
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), ValueError("out of memory")])
def test_errors_that_do_not(error: Exception) -> None:
    assert not is_out_of_memory(error)


@pytest.mark.parametrize("part", ["forward", "verify"])
@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("control", ["fixed", "adaptive"])
def test_a_step_without_memory_ends_its_requests_alone(part: str, step: int, control: Any) -> None:
    """Those of the step end with the reason; one that waits is answered as if nothing had been."""
    want = {name: request(name, *ids) for name, ids in PROMPTS.items()}
    for item in want.values():
        run_all(toy_engine(), [item])
    truth = {name: item.output_ids for name, item in want.items()}
    drafter = TruthDrafter(truth, seed=1, hit_rate=0.7)
    engine = toy_engine(
        max_running=2, drafter=drafter, node_budget=6, token_budget=40, control=control
    )
    out_of_memory_at(engine, step, part, MemoryError())
    got = {name: request(name, *ids) for name, ids in PROMPTS.items()}
    outputs = run_all(engine, list(got.values()))
    failed = {name for name, item in got.items() if item.finish_reason == "error"}
    assert failed == {"a", "b"}
    assert [o.error for o in outputs if o.finish_reason == "error"] == [OUT_OF_MEMORY] * 2
    assert got["waits"].output_ids == truth["waits"]
    assert contents(engine.runner.kv_cache).isfinite().all()
    again = request("again", *PROMPTS["a"])
    run_all(engine, [again])
    assert again.output_ids == truth["a"]


PROMPTS = {
    "a": tuple(range(20)),
    "b": tuple(i * 5 % len(ALPHABET) for i in range(40)),
    "waits": (3, 1, 4, 1, 5),
}


def test_another_error_ends_the_engine() -> None:
    """Only for want of memory is a step known to have changed nothing that matters."""
    engine = toy_engine()
    out_of_memory_at(engine, 1, "forward", RuntimeError("shapes differ"))
    with pytest.raises(RuntimeError, match="shapes differ"):
        run_all(engine, [request("a", 1, 2)])


def test_a_commit_without_memory_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a commit cannot be taken back."""
    engine = toy_engine()

    def fails(*args: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(engine._committer, "commit", fails)
    with pytest.raises(MemoryError):
        run_all(engine, [request("a", 1, 2)])
    check_pool(engine)
