"""Suspects: who is blamed for the engine's end, who is cleared, and who has to wait."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from specdec.errors import EngineStopped, InvalidRequest
from specdec.limits import SpeculationLimits
from specdec.params import SamplingParams
from specdec.request import FinishReason
from specdec.server.messages import Output, Submit
from specdec.server.suspects import Suspects

numbers = itertools.count()


def submit(*prompt_ids: int, seed: int | None = None, **more: Any) -> Submit:
    """With an id that no other has."""
    return Submit(f"r-{next(numbers)}", prompt_ids, SamplingParams(seed=seed), **more)


def finish(suspects: Suspects, *submits: Submit, reason: FinishReason = "stop") -> None:
    for item in submits:
        suspects.finish(Output(item.request_id, finish_reason=reason))


def is_refused(suspects: Suspects, *submits: Submit) -> bool:
    try:
        suspects.admit(submits)
    except InvalidRequest:
        return True
    return False


def test_who_ends_the_engine_twice_is_refused() -> None:
    suspects = Suspects()
    for _ in range(2):
        assert not is_refused(suspects, submit(1))
        suspects.blame()
    assert is_refused(suspects, submit(1))
    assert is_refused(suspects, submit(1, priority=3, cache_salt="other"))
    assert not is_refused(suspects, submit(2))


@pytest.mark.parametrize(
    "other",
    [
        submit(1, 2),
        submit(1, seed=7),
        submit(1, prediction_ids=(5,)),
        submit(1, speculation=SpeculationLimits(max_nodes=0)),
    ],
)
def test_other_requests_are_told_apart(other: Submit) -> None:
    suspects = Suspects()
    for _ in range(2):
        suspects.admit([submit(1)])
        suspects.blame()
    assert not is_refused(suspects, other)
    suspects.blame()
    assert is_refused(suspects, submit(1))


def test_suspects_run_one_after_the_other() -> None:
    """So the second death convicts one; the other was merely there the first time."""
    suspects = Suspects()
    suspects.admit([submit(1)])
    suspects.admit([submit(2)])
    suspects.blame()
    suspects.admit([submit(1)])
    suspects.admit([submit(3)])  # no suspect
    with pytest.raises(EngineStopped, match="it can run after that one"):
        suspects.admit([submit(2)])
    suspects.blame()
    assert is_refused(suspects, submit(1))
    suspects.admit([submit(2)])
    with pytest.raises(EngineStopped):
        suspects.admit([submit(3)])  # one by now


def test_the_same_suspect_may_run_many_times_at_once() -> None:
    suspects = Suspects()
    suspects.admit([submit(1)])
    suspects.blame()
    twins = submit(1), submit(1)
    for twin in twins:
        suspects.admit([twin])
    finish(suspects, twins[0])
    suspects.blame()
    assert is_refused(suspects, submit(1))


def test_a_suspect_that_finishes_is_cleared() -> None:
    suspects = Suspects()
    suspects.admit([submit(1)])
    suspects.blame()
    survivor = submit(1)
    suspects.admit([survivor])
    finish(suspects, survivor)
    suspects.admit([submit(1)])
    suspects.blame()
    assert not is_refused(suspects, submit(1))


def test_a_suspect_that_was_never_computed_is_not_cleared() -> None:
    """Its client went away, or the engine refused it, before what ends the engine was reached."""
    suspects = Suspects()
    suspects.admit([submit(1)])
    suspects.blame()
    aborted, refused = submit(1), submit(1)
    suspects.admit([aborted])
    finish(suspects, aborted, reason="abort")
    suspects.admit([refused])
    suspects.finish(Output(refused.request_id, finish_reason="error", error_kind="InvalidRequest"))
    suspects.blame()  # something else: nothing ran
    assert not is_refused(suspects, submit(1))
    suspects.blame()
    assert is_refused(suspects, submit(1))


def test_choices_of_one_answer_are_one_request() -> None:
    """They may run together, and none clears the others."""
    suspects = Suspects()
    answer = [submit(1, seed=1), submit(1, seed=2)]
    suspects.admit(answer)
    suspects.blame()
    answer = [submit(1, seed=1), submit(1, seed=2)]
    suspects.admit(answer)
    finish(suspects, answer[0])
    suspects.blame()
    assert is_refused(suspects, submit(1, seed=1), submit(1, seed=2))
    assert not is_refused(suspects, submit(1, seed=1))


def test_what_is_known_is_bounded_and_the_unmet_is_forgotten() -> None:
    suspects = Suspects(max_known=2)
    for _ in range(2):
        suspects.admit([submit(1)])
        suspects.blame()
    suspects.admit([submit(2)])
    suspects.blame()
    assert is_refused(suspects, submit(1))  # met: suspect 2 is the older one now
    suspects.admit([submit(3)])
    suspects.blame()
    assert is_refused(suspects, submit(1))
    suspects.admit([submit(2)])
    suspects.admit([submit(3)])  # need not wait for 2, which is nobody's suspect any more
    suspects.blame()
    suspects.admit([submit(4)])
    suspects.blame()
    assert not is_refused(suspects, submit(1))
