"""Opens the three doors of the conformance kit as an outsider would: from wheels alone, in an empty environment.

The wheels of the core, the kit and one or more connectors are built and installed into a new environment, together
with what they depend on and nothing of the source tree.  Then, in an empty folder:

(a) a test file of three lines, (b) ``pytest --pyargs kvbaton_conformance.run``, (c) ``kvbaton conformance``;

each must pass and find the same tests.

    python tools/check_doors.py                                        # the loopback
    python tools/check_doors.py --level connector examples/third_party_shm
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

THREE_LINES = """from kvbaton_conformance import ConnectorConformance
class TestMine(ConnectorConformance):
    connector = {name!r}
"""


class Unfit(Exception):
    """A door does not open; the text says which and why."""


def run(doing: str, command: Sequence[str | Path], cwd: Path) -> None:
    """Run to the end with its output shown; a failure is Unfit."""
    words = [str(part) for part in command]
    done = subprocess.run(words, cwd=cwd, stdin=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise Unfit(f"{doing}: exit status {done.returncode} of {' '.join(words)}")


def connector_of(folder: Path) -> str:
    """The name under which a distribution offers its connector."""
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    (name,) = project["entry-points"]["kvbaton.connectors"]
    return str(name)


def tests_of(report: Path) -> set[str]:
    """The identifiers of what was run, where the verdict is that it conforms."""
    verdict = json.loads((report / "conformance.json").read_text())
    if not verdict["conforms"]:
        raise Unfit(f"{report.name}: {verdict['verdict']}")
    return {test["id"] for test in verdict["tests"]}


def check(folder: Path, level: str, python: Path, scratch: Path) -> None:
    """All doors for the connector of ``folder``."""
    name = connector_of(folder)
    pytest: list[str | Path] = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--conformance-level", level]
    doors: dict[str, list[str | Path]] = {
        "three-lines": [*pytest, "test_mine.py"],
        "by-name": [*pytest, "--pyargs", "kvbaton_conformance.run", "--connector", name],
        "command": [python.with_name("kvbaton"), "conformance", name, "--level", level],
    }
    found: dict[str, set[str]] = {}
    for door, command in doors.items():
        empty = scratch / f"{name}-{door}"
        empty.mkdir()
        report = empty / "report"
        if door == "three-lines":
            (empty / "test_mine.py").write_text(THREE_LINES.format(name=name))
        option = "--report" if door == "command" else "--conformance-report"
        started = time.monotonic()
        run(f"{name}, door {door}", [*command, option, report], empty)
        found[door] = tests_of(report)
        print(f"== {name}, door {door}: {len(found[door])} tests, {time.monotonic() - started:.0f} s", flush=True)
    if len({frozenset(tests) for tests in found.values()}) != 1:
        raise Unfit(f"{name}: the doors found different tests: { {door: len(tests) for door, tests in found.items()} }")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, default=[ROOT / "plugins" / "loopback"], metavar="FOLDER")
    parser.add_argument("--level", choices=("connector", "handoff", "all"), default="all")
    arguments = parser.parse_args()
    folders = [folder.resolve() for folder in arguments.folders]
    with tempfile.TemporaryDirectory(prefix="kvbaton-doors-") as temporary:
        scratch = Path(temporary)
        wheels = scratch / "dist"
        for folder in (ROOT / "core", ROOT / "conformance", *folders):
            run(f"building {folder.name}", [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir",
                wheels, folder], ROOT)  # fmt: skip
        run("making an empty environment", [sys.executable, "-m", "venv", "--without-pip", "env"], scratch)
        python = scratch / "env" / "bin" / "python"
        core = next(wheels.glob("kvbaton-[0-9]*.whl"))
        others = [wheel for wheel in wheels.glob("*.whl") if wheel != core]
        run("installing the wheels", [sys.executable, "-m", "pip", "--python", python, "install", "-qq",
            "--constraint", ROOT / "constraints.txt", f"{core}[cli]", *others], scratch)  # fmt: skip
        try:
            for folder in folders:
                check(folder, arguments.level, python, scratch)
        except Unfit as reason:
            print(f"UNFIT {reason}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
