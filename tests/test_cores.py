"""Threads of a forward: physical cores, and what a container grants."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdec.cores import usable_cores


def machine(root: Path, cores: list[tuple[int, int]], cpu_max: str | None = None) -> Path:
    """A /sys of cpus that are (package, core)."""
    for cpu, (package, core) in enumerate(cores):
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text(f"{package}\n")
        (topology / "core_id").write_text(f"{core}\n")
    if cpu_max is not None:
        (root / "sys/fs/cgroup").mkdir(parents=True)
        (root / "sys/fs/cgroup/cpu.max").write_text(cpu_max)
    return root


def test_threads_of_one_core_count_once(tmp_path: Path) -> None:
    root = machine(tmp_path, [(0, 0), (0, 1), (0, 0), (0, 1)])
    assert usable_cores(range(4), root) == 2
    assert usable_cores([0, 2], root) == 1  # both on core 0


def test_cores_of_two_packages_have_the_same_numbers(tmp_path: Path) -> None:
    assert usable_cores(range(4), machine(tmp_path, [(0, 0), (0, 1), (1, 0), (1, 1)])) == 4


@pytest.mark.parametrize(
    ("cpu_max", "cores"),
    [
        ("max 100000\n", 4),
        ("200000 100000\n", 2),
        ("150000 100000\n", 2),
        ("10000 100000\n", 1),
        ("900000 100000\n", 4),
        ("nonsense", 4),
    ],
)
def test_a_container_may_grant_less(tmp_path: Path, cpu_max: str, cores: int) -> None:
    root = machine(tmp_path, [(0, core) for core in range(4)], cpu_max)
    assert usable_cores(range(4), root) == cores


def test_a_system_that_does_not_say(tmp_path: Path) -> None:
    assert usable_cores(range(3), tmp_path) == 3
    assert usable_cores([], tmp_path) == 1
