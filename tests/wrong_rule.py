"""WrongRule: engines that verify by another rule than they should, for tests of what notices."""

from __future__ import annotations

import pytest

from specdec import verification
from specdec.host_verifier import HostVerifier
from specdec.verification import NextNode


def verify_by(rule: NextNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that are made from now on verify on the host, by this rule in place of the coupled.

    The native library and a GPU have rules of their own, which would not notice.
    """
    monkeypatch.setitem(verification._RULES, "coupled", rule)
    monkeypatch.setattr("specdec.engine.make_verifier", lambda name, device: HostVerifier(name))
