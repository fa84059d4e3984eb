"""How OpenMP's threads wait for each other; to be said before torch is imported."""

from __future__ import annotations

import os


def sleep_while_waiting() -> None:
    """Let waiting threads sleep instead of spin, unless the environment says otherwise.

    A forward has some hundred short parallel regions. With the default spinning, one other busy
    process makes each of them wait for a time slice: steps took 2 to 5 times as long, start-up ten
    times (docs/lab-log.md). OpenMP reads the variable when torch is loaded.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
