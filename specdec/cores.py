"""Cores: how many threads a forward should have here."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path


def usable_cores(cpus: Iterable[int] | None = None, root: Path = Path("/")) -> int:
    """Physical cores that this process may use, at least one.

    Two threads of one core share its vector unit and gain nothing; more threads than a container's
    share of time are stopped in the middle of a step. `cpus` are by default those that the process
    may run on; `root` is where /sys is, for tests.

    Example: 1 with `docker run --cpus 1`, 4 on a laptop of four cores with two threads each.
    """
    allowed = list(os.sched_getaffinity(0) if cpus is None else cpus)
    cores = {_core(root / f"sys/devices/system/cpu/cpu{cpu}/topology", cpu) for cpu in allowed}
    share = _share(root)
    return max(1, len(cores) if share is None else min(len(cores), math.ceil(share)))


def _core(topology: Path, cpu: int) -> tuple[str, str]:
    """Package and core of a cpu; where the system does not say, each cpu is a core."""
    try:
        package = (topology / "physical_package_id").read_text(encoding="ascii")
        return package.strip(), (topology / "core_id").read_text(encoding="ascii").strip()
    except OSError:
        return "cpu", str(cpu)


def _share(root: Path) -> float | None:
    """Cores' worth of time that the control group grants (cgroup v2), None if unlimited."""
    try:
        quota, period = (root / "sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None
