"""The drafters that come with a target: found by its name, and nothing else."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from specdec.drafters.pretrained import lookup
from specdec.drafters.pretrained.lookup import pretrained
from specdec.errors import UsageError
from tests.toy import toy_model


def test_a_drafter_is_found_by_the_name_of_its_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup, "_FOLDER", tmp_path)
    for target in ("some-model", "other-model"):
        (tmp_path / target / "medusa").mkdir(parents=True)
    model = dataclasses.replace(toy_model(), name="some-model")
    assert pretrained(model, "medusa") == tmp_path / "some-model" / "medusa"
    with pytest.raises(UsageError, match=r"no small-model .*some-model \(there are for: none\)"):
        pretrained(model, "small-model")


@pytest.mark.parametrize(
    "name", ["toy", "/models/some-model", "../some-model", "org/some-model", ""]
)
def test_for_another_target_the_error_says_what_there_is_and_what_to_do(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "inside" / "some-model" / "medusa").mkdir(parents=True)
    (tmp_path / "some-model" / "medusa").mkdir(parents=True)  # not for `../some-model` either
    monkeypatch.setattr(lookup, "_FOLDER", tmp_path / "inside")
    with pytest.raises(UsageError) as caught:
        pretrained(dataclasses.replace(toy_model(), name=name), "medusa")
    says = str(caught.value)
    assert "(there are for: some-model)" in says
    assert "--drafter medusa=FOLDER" in says and "`specdec train medusa`" in says
