"""Opens the three doors of the conformance kit as an outsider would: from wheels alone, in an empty environment.

The wheels of the core, the kit and the connectors are built and installed into a new environment, together with what
they depend on and nothing of the source tree.  Then, in an empty folder and for each connector:

(a) a test file of three lines, (b) ``pytest --pyargs kvbaton_conformance.run``, (c) ``kvbaton conformance``.

All must find the same tests.  (a) and (b) list them; (c), which lists nothing, runs one and counts the others.  With
``--full`` each door runs all of them and must find that the connector conforms.

    python tools/check_doors.py                                          # the loopback and both examples
    python tools/check_doors.py --full examples/third_party_shm          # minutes
    python tools/check_doors.py --wheels DIR                             # of wheels that are built
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

CONNECTORS = ("plugins/loopback", "examples/third_party_shm", "examples/third_party_stream")

THREE_LINES = """from kvbaton_conformance import ConnectorConformance
class TestMine(ConnectorConformance):
    connector = {name!r}
"""

#: What (c) runs when it need not run everything.
ONE = "test_a_chunk_ends_once"

#: Core's guard is judged beside the connector by (b) and (c), which need no file to say so.
GUARD = "::TestGuard::"


class Unfit(Exception):
    """A door does not open; the text says which and why."""


def run(doing: str, command: Sequence[str | Path], cwd: Path) -> None:
    """Run to the end with its output shown; a failure is Unfit."""
    words = [str(part) for part in command]
    done = subprocess.run(words, cwd=cwd, stdin=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise Unfit(f"{doing}: exit status {done.returncode} of {' '.join(words)}")


def said(doing: str, command: Sequence[str | Path], cwd: Path) -> str:
    """What it prints; a failure is Unfit."""
    words = [str(part) for part in command]
    done = subprocess.run(words, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unfit(f"{doing}: exit status {done.returncode} of {' '.join(words)}\n{done.stdout}{done.stderr}")
    return done.stdout


def connector_of(folder: Path) -> str:
    """The name under which a distribution offers its connector."""
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    (name,) = project["entry-points"]["kvbaton.connectors"]
    return str(name)


class Doors:
    """The three doors for one connector; ``python`` is the empty environment's."""

    def __init__(self, name: str, python: Path, scratch: Path) -> None:
        self.name = name
        self._scratch = scratch
        pytest: list[str | Path] = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        self._pytest: dict[str, list[str | Path]] = {
            "three-lines": [*pytest, "test_mine.py"],
            "by-name": [*pytest, "--pyargs", "kvbaton_conformance.run", "--connector", name],
        }
        self._command: list[str | Path] = [python.with_name("kvbaton"), "conformance", name]

    def same_tests(self) -> None:
        """Each finds the same; raises :class:`Unfit`."""
        started = time.monotonic()
        found: dict[str, set[str]] = {}
        guard = 0
        for door, command in self._pytest.items():
            listed = said(f"{self.name}, door {door}", [*command, "--collect-only"], self._folder(door))
            tests = [line for line in listed.splitlines() if re.match(r"\S+::\S+::test_", line)]
            found[door] = {line.partition("::test_")[2] for line in tests if GUARD not in line}
            guard = sum(GUARD in line for line in tests)
        if found["three-lines"] != found["by-name"] or not found["by-name"]:
            apart = sorted(found["three-lines"] ^ found["by-name"])
            raise Unfit(f"{self.name}: doors (a) and (b) do not find the same tests: {apart[:5]}, {len(apart)} in all")
        text = said(f"{self.name}, door command", [*self._command, "-k", ONE, "--partial"], self._folder("command"))
        counts = re.search(r"(\d+) passed, (\d+) deselected", text)
        expected = len(found["by-name"]) + guard
        if counts is None or sum(map(int, counts.groups())) != expected:
            raise Unfit(f"{self.name}: door (c) does not find the {expected} tests of door (b):\n{text}")
        print(
            f"== {self.name}: {len(found['by-name'])} tests by each door, and {guard} of core's guard,"
            f" {time.monotonic() - started:.0f} s",
            flush=True,
        )

    def same_verdicts(self) -> None:
        """Each runs everything, and it conforms; raises :class:`Unfit`."""
        found: dict[str, set[str]] = {}
        for door, command in {**self._pytest, "command": self._command}.items():
            folder = self._folder(door)
            option = "--report" if door == "command" else "--conformance-report"
            started = time.monotonic()
            run(f"{self.name}, door {door}", [*command, option, folder / "report"], folder)
            verdict = json.loads((folder / "report" / "conformance.json").read_text())
            if not verdict["conforms"]:
                raise Unfit(f"{self.name}, door {door}: {verdict['verdict']}")
            found[door] = {test["id"] for test in verdict["tests"] if not test["id"].startswith("guard.")}
            print(f"== {self.name}, {door}: {len(found[door])} tests, {time.monotonic() - started:.0f} s", flush=True)
        if len({frozenset(tests) for tests in found.values()}) != 1:
            raise Unfit(f"{self.name}: not the same tests: { {door: len(tests) for door, tests in found.items()} }")

    def _folder(self, door: str) -> Path:
        """Empty, but for the file that door (a) is."""
        folder = Path(tempfile.mkdtemp(prefix=f"{self.name}-{door}-", dir=self._scratch))
        if door == "three-lines":
            (folder / "test_mine.py").write_text(THREE_LINES.format(name=self.name))
        return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    everything = [ROOT / folder for folder in CONNECTORS]
    parser.add_argument("folders", nargs="*", type=Path, default=everything, metavar="FOLDER")
    parser.add_argument("--full", action="store_true", help="each door runs everything")
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="where the wheels are built already")
    arguments = parser.parse_args()
    folders = [folder.resolve() for folder in arguments.folders]
    with tempfile.TemporaryDirectory(prefix="kvbaton-doors-") as temporary:
        scratch = Path(temporary)
        wheels = arguments.wheels or scratch / "dist"
        packages = []
        try:
            for folder in (ROOT / "core", ROOT / "conformance", *folders):
                if arguments.wheels is None:
                    run(f"building {folder.name}", [sys.executable, "-m", "build", "--no-isolation", "--wheel",
                        "--outdir", wheels, folder], ROOT)  # fmt: skip
                name = tomllib.loads((folder / "pyproject.toml").read_text())["project"]["name"].replace("-", "_")
                packages.append(next(wheels.glob(f"{name}-[0-9]*.whl")))
            run("making an empty environment", [sys.executable, "-m", "venv", "--without-pip", "env"], scratch)
            python = scratch / "env" / "bin" / "python"
            run("installing the wheels", [sys.executable, "-m", "pip", "--python", python, "install", "-qq",
                "--constraint", ROOT / "constraints.txt", f"{packages[0]}[cli]", *packages[1:]], scratch)  # fmt: skip
            for folder in folders:
                doors = Doors(connector_of(folder), python, scratch)
                if arguments.full:
                    doors.same_verdicts()
                else:
                    doors.same_tests()
        except Unfit as reason:
            print(f"UNFIT {reason}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
