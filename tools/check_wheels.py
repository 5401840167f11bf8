"""Builds every distribution and tries each from its wheel, alone, in an empty environment of its own.

For each distribution: build the sdist, and the wheel from the sdist; look into both (``py.typed``, licence, the tests
in the sdist, every file of the source tree, no stray ones) and at what an index would show of them (``twine check``);
install the wheel with its dependencies and nothing else; import it and load its entry points; see that torch came along
only where it is a declared dependency; then add what its tests need (its dependency group ``test``, first-party members
taken from the wheels just built; and ``test-without-dependencies``), import every module, and run its tests on a copy,
so that nothing can come from the source tree.  Versions are those of ``constraints.txt``, and the oldest that is
declared of what ``tool.kvbaton.wheels`` of the workspace calls so.  Where all are tried, the doors of the conformance
kit are opened too (``check_doors.py``).

    python tools/check_wheels.py                 # all of them
    python tools/check_wheels.py kvbaton         # only the named ones
    python tools/check_wheels.py --into dist --tag v0.1.0    # a release: build and look at what is published
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

_NAME = re.compile(r"[\w.-]+")

LOADS = """
import importlib, importlib.metadata, importlib.util, sys
name, package, torch = sys.argv[1:]
where = importlib.import_module(package).__file__
assert where and "site-packages" in where, f"{package} was imported from {where}, not from its wheel"
for entry in importlib.metadata.distribution(name).entry_points:
    if entry.group.startswith("kvbaton."):
        entry.load()
        print(f"  entry point {entry.group}: {entry.name} loads")
found = importlib.util.find_spec("torch") is not None
assert found == (torch == "torch"), f"torch is {'installed' if found else 'missing'}, against what {name} declares"
"""

EVERY_MODULE = """
import importlib, pkgutil, sys
package, *extras = sys.argv[1:]
def fails(name): raise ImportError(f"{name} cannot be imported")
where = importlib.import_module(package).__path__
found = [one.name for one in pkgutil.walk_packages(where, f"{package}.", fails) if not one.name.endswith(".__main__")]
for name in found:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as missing:
        if missing.name not in extras:
            raise
        print(f"  {name} wants {missing.name}, which an extra brings")
print(f"  {len(found)} modules of {package}")
"""


class Unfit(Exception):
    """A distribution is not fit to be published; the text says why."""


@dataclass(frozen=True)
class Distribution:
    """One folder of the workspace that becomes a wheel."""

    folder: Path
    name: str
    version: str
    package: str
    needs_torch: bool
    #: What its extras bring, as it is imported.
    extras: tuple[str, ...]
    test_needs: tuple[str, ...]
    test_needs_alone: tuple[str, ...]

    @property
    def wheel(self) -> str:
        """File name of its wheel, by the rules of the wheel format."""
        return f"{self.package}-{self.version}-py3-none-any.whl"

    @property
    def sdist(self) -> str:
        """File name of its sdist."""
        return f"{self.package}-{self.version}.tar.gz"

    @property
    def is_published(self) -> bool:
        """Whether it is part of a release; the examples are not."""
        return not self.folder.is_relative_to(ROOT / "examples")


def named(requirement: str) -> str:
    """The project that a requirement names."""
    return requirement.split(">")[0].split("~")[0].strip()


def distributions() -> list[Distribution]:
    """All of the workspace, in the order of their folders."""
    found = []
    places = ("*", "plugins/*", "examples/third_party_*")
    for file in sorted(file for place in places for file in ROOT.glob(f"{place}/pyproject.toml")):
        content: dict[str, Any] = tomllib.loads(file.read_text())
        project, groups = content["project"], content.get("dependency-groups", {})
        extras = project.get("optional-dependencies", {}).values()
        names = [named(requirement) for requirement in project.get("dependencies", ())]
        found.append(
            Distribution(
                folder=file.parent,
                name=project["name"],
                version=project["version"],
                package=project["name"].replace("-", "_"),
                needs_torch=bool({"torch", "nixl"} & set(names)),  # nixl brings torch
                extras=tuple(sorted({named(line).replace("-", "_") for lines in extras for line in lines})),
                test_needs=tuple(groups.get("test", ())),
                test_needs_alone=tuple(groups.get("test-without-dependencies", ())),
            )
        )
    return found


def run(doing: str, command: Sequence[str | Path], cwd: Path, **environment: str) -> None:
    """Run to the end with its output shown; a failure is Unfit, and says what was being done."""
    words = [str(part) for part in command]
    ours = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # nothing from a source tree
    process = subprocess.run(words, cwd=cwd, env={**ours, **environment}, stdin=subprocess.DEVNULL, check=False)
    if process.returncode:
        raise Unfit(f"{doing}: exit status {process.returncode} of {' '.join(words[:3])} ...; see its output above")


def build(distribution: Distribution, into: Path) -> None:
    """The sdist, then the wheel from the unpacked sdist: what the sdist lacks, the wheel lacks."""
    run("building it", [sys.executable, "-m", "build", "--no-isolation", "--outdir", into, distribution.folder], ROOT)
    wheel = into / distribution.wheel
    if not wheel.is_file():
        raise Unfit(f"the build made no {distribution.wheel}: {sorted(path.name for path in into.iterdir())}")
    info = f"{distribution.package}-{distribution.version}.dist-info"
    names = zipfile.ZipFile(wheel).namelist()
    for needed in (f"{distribution.package}/py.typed", f"{info}/licenses/LICENSE"):
        if needed not in names:
            raise Unfit(f"{distribution.wheel} lacks {needed}")
    source = distribution.folder / "src"
    of_package = (source / distribution.package).rglob("*")
    written = {path.relative_to(source).as_posix() for path in of_package if path.is_file()}
    lost = sorted(name for name in written - set(names) if "__pycache__" not in name)
    if lost:
        raise Unfit(f"{distribution.wheel} lacks {lost}, which the source tree has")
    stray = [name for name in names if name.split("/")[0] not in (distribution.package, info)]
    if stray:
        raise Unfit(f"{distribution.wheel} holds files that are not its own: {stray}")
    with tarfile.open(into / distribution.sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    for needed in ("pyproject.toml", "PKG-INFO", "README.md", "LICENSE", f"src/{distribution.package}/py.typed"):
        if needed not in inside:
            raise Unfit(f"{distribution.sdist} lacks {needed}")
    if not any(name.startswith("tests/test_") or "/test_" in name for name in inside):
        raise Unfit(f"{distribution.sdist} lacks its tests, by which who packages it sees that it works")
    own = ("src", "tests", "README.md", "LICENSE", "pyproject.toml", "PKG-INFO", ".gitignore")
    stray = [name for name in inside if name.split("/")[0] not in own or "__pycache__" in name]
    if stray:
        raise Unfit(f"{distribution.sdist} holds files that are not its own: {stray}")
    run(
        "asking what an index would show of it",
        [sys.executable, "-m", "twine", "check", "--strict", wheel, into / distribution.sdist],
        ROOT,
    )


def release(known: Sequence[Distribution], into: Path, tag: str) -> None:
    """What a release publishes, built and looked at; raises :class:`Unfit`.

    ``tag`` must be the version that all of them have, and the changelog must have it; empty: neither is looked at.
    """
    published = [distribution for distribution in known if distribution.is_published]
    if tag:
        wrong = [f"{d.name} {d.version}" for d in published if tag != f"v{d.version}"]
        if wrong:
            raise Unfit(f"the tag is {tag}, and these are of another version: {', '.join(wrong)}")
        if f"## {tag[1:]} (" not in (ROOT / "CHANGELOG.md").read_text():
            raise Unfit(f"CHANGELOG.md has no {tag[1:]}: run towncrier build --version {tag[1:]}")
    into.mkdir(parents=True, exist_ok=True)
    if any(into.iterdir()):
        raise Unfit(f"{into} is not empty: what lies there would be published as well")
    for distribution in published:
        build(distribution, into)
    print("\n".join(sorted(file.name for file in into.iterdir())))


def try_out(distribution: Distribution, wheels: Path, constraints: dict[str, str], scratch: Path) -> None:
    """Install the wheel in a new environment, look at it, and run the distribution's tests against it."""
    run("making an empty environment", [sys.executable, "-m", "venv", "--without-pip", "env"], scratch)
    python = scratch / "env" / "bin" / "python"
    install: list[str | Path] = [sys.executable, "-m", "pip", "--python", python, "install", "-qq"]
    run("installing the wheel", [*install, wheels / distribution.wheel], scratch, **constraints)
    facts = (distribution.name, distribution.package, "torch" if distribution.needs_torch else "no torch")
    run("importing it", [python, "-I", "-c", LOADS, *facts], scratch)
    if not (distribution.folder / "tests").is_dir():
        raise Unfit(f"{distribution.folder.relative_to(ROOT)} has no tests/: what shows that its wheel works?")
    run("installing what its tests need", [*install, *distribution.test_needs], scratch, **constraints)
    run("checking its dependencies", [sys.executable, "-m", "pip", "--python", python, "check"], scratch)
    if distribution.test_needs_alone:
        alone = [*install, "--no-deps", *distribution.test_needs_alone]
        run("installing what its tests need without dependencies", alone, scratch, **constraints)
    every: tuple[str, ...] = (EVERY_MODULE, distribution.package, *distribution.extras)
    run("importing every module", [python, "-I", "-c", *every], scratch)
    tests = distribution.folder / "tests"
    shutil.copytree(tests, scratch / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    for file in left_out(distribution):
        (scratch / "tests" / file.relative_to(tests)).unlink()
    pytest: list[str | Path] = [python, "-m", "pytest", "-c", ROOT / "pyproject.toml", "--rootdir", scratch]
    run(
        "running its tests",
        [*pytest, "-p", "no:cacheprovider", "--hypothesis-profile=ci", "-q", scratch / "tests"],
        scratch,
    )
    if any(need.startswith("torch") for need in distribution.test_needs):
        facts = (*facts[:2], "torch")
    run("importing it after its tests' needs were added", [python, "-I", "-c", LOADS, *facts], scratch)


def settings() -> dict[str, Any]:
    """``tool.kvbaton.wheels`` of the workspace."""
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["kvbaton"]["wheels"]
    return found


def constraints_with_oldest() -> str:
    """``constraints.txt``, but of what the settings call ``oldest``, which the other environments have as new."""
    instead = [*settings()["oldest"], *settings()["with-oldest"]]
    names = {_NAME.match(line)[0] for line in instead}  # type: ignore[index]
    lines = [
        line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.partition("==")[0] not in names
    ]
    return "\n".join([*lines, *(line for line in instead if line not in names), ""])


def left_out(distribution: Distribution) -> list[Path]:
    """What is run from the source tree only, because it takes long."""
    files = [ROOT / file for file in settings()["left-out"]]
    return [file for file in files if file.is_relative_to(distribution.folder / "tests")]


def main() -> int:
    """Exit status: 0 when every chosen distribution is fit."""
    known = distributions()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="one of: " + ", ".join(d.name for d in known))
    parser.add_argument("--into", type=Path, metavar="DIR", help="build what a release publishes, and leave it there")
    parser.add_argument("--tag", default="", metavar="vX.Y.Z", help="with --into: the version that it must have")
    arguments = parser.parse_args()
    if arguments.into is not None:
        release(known, arguments.into.resolve(), arguments.tag)
        return 0
    chosen = arguments.names or [distribution.name for distribution in known]
    unknown = set(chosen) - {distribution.name for distribution in known}
    if unknown:
        parser.error(f"no such distribution: {', '.join(sorted(unknown))}")

    failures: list[str] = []
    lines: list[str] = []
    with tempfile.TemporaryDirectory(prefix="kvbaton-wheels-") as temporary:
        wheels = Path(temporary) / "dist"
        wheels.mkdir()
        first_party = Path(temporary) / "first-party.txt"
        for distribution in known:
            build(distribution, wheels)
        # Our own names come from these wheels and from nowhere else, whatever an index offers under them.
        first_party.write_text("".join(f"{d.name} @ {(wheels / d.wheel).as_uri()}\n" for d in known))
        others = Path(temporary) / "constraints.txt"
        others.write_text(constraints_with_oldest())
        constraints = {"PIP_CONSTRAINT": f"{others} {first_party}"}
        for distribution in known:
            if distribution.name not in chosen:
                continue
            print(f"\n=== {distribution.name} {distribution.version}, from its wheel", flush=True)
            scratch = Path(temporary) / distribution.package
            scratch.mkdir()
            started = time.monotonic()
            try:
                try_out(distribution, wheels, constraints, scratch)
            except Unfit as reason:
                failures.append(f"{distribution.name}: {reason}")
            shutil.rmtree(scratch)
            lines.append(f"{distribution.name:24} {time.monotonic() - started:6.0f} s")
        if len(chosen) == len(known):
            print("\n=== the doors of the conformance kit", flush=True)
            started = time.monotonic()
            try:
                run("opening the doors", [sys.executable, ROOT / "tools" / "check_doors.py", "--wheels", wheels], ROOT)
            except Unfit as reason:
                failures.append(f"check_doors.py: {reason}")
            lines.append(f"{'check_doors.py':24} {time.monotonic() - started:6.0f} s")
    print("\n" + "\n".join(lines))
    for failure in failures:
        print(f"UNFIT {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Unfit as reason:
        sys.exit(f"UNFIT {reason}")
