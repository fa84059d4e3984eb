"""Build the wheel, directly and from the sdist, and use it away from the repository.

Run as `make wheel`. The check works in a copy of the sources: an old `build/` cannot leak in.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LINKED = ("drafters", "kernels", "server", "evals")
USE = """\
import pathlib, sys
from importlib.metadata import entry_points
import specdec.engine
home = pathlib.Path(specdec.__file__).resolve()
assert home.is_relative_to(sys.prefix), f"imported {home}, not the installed wheel"
for point in entry_points(group="specdec.drafters"):
    point.load()
"""


def run(*command: str | Path, cwd: Path) -> None:
    """Run a command with nothing of the repository on its path; print its output if it fails."""
    env = os.environ | {"PYTHONSAFEPATH": "1"}
    env.pop("PYTHONPATH", None)
    done = subprocess.run(
        command, cwd=cwd, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode != 0:
        shown = " ".join(str(part) for part in command)
        sys.exit(f"check_wheel: failed: {shown}\n{done.stdout}{done.stderr}")


def copy_sources(to: Path) -> None:
    """Copy what a build reads, links as links."""
    ignore = shutil.ignore_patterns("__pycache__")
    for folder in ("specdec", *LINKED):
        shutil.copytree(ROOT / folder, to / folder, symlinks=True, ignore=ignore)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, to / file)


def source_files(sources: Path) -> set[str]:
    """Every file of the package, by its name in the wheel; hidden files do not ship."""
    found = set()
    for folder in ("specdec", *LINKED):
        prefix = "" if folder == "specdec" else "specdec/"
        for path in (sources / folder).rglob("*"):
            name = prefix + path.relative_to(sources).as_posix()
            is_through_link = folder == "specdec" and name.split("/")[1] in LINKED
            if path.is_file() and not is_through_link and not path.name.startswith("."):
                found.add(name)
    return found


def check_contents(wheel: Path, expected: set[str]) -> None:
    """The wheel holds the package's files as real files, its own metadata and nothing else."""
    with zipfile.ZipFile(wheel) as archive:
        links = [i.filename for i in archive.infolist() if (i.external_attr >> 28) == 0o12]
        names = {name for name in archive.namelist() if not name.endswith("/")}
    tops = {name.split("/")[0] for name in names}
    packed = {name for name in names if ".dist-info/" not in name}
    problems = [f"a link, not a file: {name}" for name in links]
    problems += [f"missing: {name}" for name in sorted(expected - packed)]
    problems += [f"unexpected: {name}" for name in sorted(packed - expected)]
    if len(tops) != 2 or "specdec" not in tops:
        problems.append(f"top level is {sorted(tops)}, should be specdec and its dist-info")
    if problems:
        sys.exit("\n".join([f"check_wheel: {wheel.parent.name}/{wheel.name}:", *problems]))


def check_installed(wheel: Path, scratch: Path) -> None:
    """Install into a bare environment that borrows this one's dependencies, and use it there.

    This environment's editable install stays out of sight: a path named in a .pth file is
    searched, but the .pth files in it are not read.
    """
    home = scratch / "installed"
    venv.create(home, with_pip=False, symlinks=True)
    python = home / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python)
    run(*pip, "install", "--no-deps", "--no-index", wheel, cwd=scratch)
    site = home / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    run(python, "-c", USE, cwd=scratch)
    run(home / "bin" / "specdec", "--help", cwd=scratch)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        sources = scratch / "sources"
        sources.mkdir()
        copy_sources(sources)
        expected = source_files(sources)
        direct, via_sdist = scratch / "direct", scratch / "via-sdist"
        build = (sys.executable, "-m", "build", sources)
        run(*build, "--wheel", "--outdir", direct, cwd=scratch)
        shutil.rmtree(sources / "build")
        run(*build, "--outdir", via_sdist, cwd=scratch)
        for folder in (direct, via_sdist):
            (wheel,) = folder.glob("*.whl")
            check_contents(wheel, expected)
        check_installed(wheel, scratch)
    print(
        f"check_wheel: {len(expected)} files; installs, imports and runs away from the repository"
    )


if __name__ == "__main__":
    main()
