"""``docs/write-a-backend.md`` is tested as it stands: its blocks become a package, and its commands print what it says.

The package that the page ends with is the example ``third_party_shm``, whose own tests are the whole suite of the kit.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import distributions as installed_at
from pathlib import Path

import pytest

from .guide import Shown, Written, blocks, definitions, write
from .workspace import ROOT

GUIDE = ROOT / "docs" / "write-a-backend.md"
EXAMPLE = ROOT / "examples" / "third_party_shm"
PACKAGE = Path("src/kvbaton_example_shm")
PAGE = list(blocks(GUIDE))
#: The whole suite is what the example's own tests are.
PARTS = [number for number, block in enumerate(PAGE) if isinstance(block, Shown) and "-k" in block.command]


def grown(folder: Path, upto: int) -> Path:
    """The package as it is at a place of the page."""
    for block in PAGE[:upto]:
        if isinstance(block, Written):
            write(block, folder)
    return folder


def test_the_page_ends_as_the_example(tmp_path: Path) -> None:
    grown(tmp_path, len(PAGE))
    for name in ("__init__.py", "mapping.py"):
        assert (tmp_path / PACKAGE / name).read_text() == (EXAMPLE / PACKAGE / name).read_text(), name
    assert (tmp_path / "tests/test_conformance.py").read_text() == (EXAMPLE / "tests/test_conformance.py").read_text()
    ours, theirs = (definitions((at / PACKAGE / "connector.py").read_text()) for at in (tmp_path, EXAMPLE))
    assert ours == theirs


def test_every_block_is_shown_as_it_stands_in_the_example_unless_a_later_one_replaces_it() -> None:
    example = definitions((EXAMPLE / PACKAGE / "connector.py").read_text())
    last: dict[str, str] = {}
    for block in PAGE:
        if isinstance(block, Written) and block.path.endswith("connector.py"):
            last |= definitions(block.text)
    last.pop("ShmConnector")  # its line is repeated with each of its parts
    assert {name for name, text in last.items() if example[name] != text} == set()


def test_the_package_of_the_page_can_be_built(tmp_path: Path) -> None:
    folder = grown(tmp_path / "package", len(PAGE))
    (folder / PACKAGE / "py.typed").touch()
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"]
    command = [*pip, "--target", str(site), str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 0, result.stderr
    (built,) = installed_at(path=[str(site)])
    (entry,) = built.entry_points.select(group="kvbaton.connectors")
    assert (entry.name, entry.value) == ("example_shm", "kvbaton_example_shm:plugin")
    assert (site / "kvbaton_example_shm" / "py.typed").exists()


# -- the commands ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Running:
    process: subprocess.Popen[str]
    log: Path


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Running]]:
    """All commands at once, each with the package as it is at its place: a failing one mostly waits."""
    started: dict[int, Running] = {}
    try:
        for number in PARTS:
            folder = tmp_path_factory.mktemp("guide")
            grown(folder, number)
            block = PAGE[number]
            assert isinstance(block, Shown)
            words = re.findall(r'"[^"]*"|\S+', block.command)
            script = Path(sys.executable).with_name(words[0])
            with (folder / "log").open("w") as log:
                process = subprocess.Popen(
                    [script, *(word.strip('"') for word in words[1:])],
                    cwd=folder, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True,
                    env={**os.environ, "PYTHONPATH": str(folder / "src"), "COLUMNS": "200"},
                )  # fmt: skip
            started[number] = Running(process, folder / "log")
        yield started
    finally:
        for run in started.values():
            run.process.kill()
            run.process.wait()


def squeezed(line: str) -> str:
    """Without the layout of tables and rulers, which depends on the width of a terminal."""
    return re.sub(r"-{4,}", "----", re.sub(r"\s+", " ", line)).strip()


@pytest.mark.parametrize("number", PARTS, ids=lambda number: f"block-{number}")
def test_a_command_prints_what_the_page_shows(running: dict[int, Running], number: int) -> None:
    block, run = PAGE[number], running[number]
    assert isinstance(block, Shown)
    status = run.process.wait(100)
    printed = run.log.read_text()
    # each looks at a part of the suite, which is no verdict where it passes
    assert status == (1 if any("DOES NOT CONFORM" in line for line in block.lines) else 3), printed
    rest = [squeezed(line) for line in printed.splitlines()]
    anywhere = False
    for line in block.lines:
        if line == "...":
            anywhere = True
            continue
        wanted = squeezed(line)
        at = rest.index(wanted) if wanted in rest else -1
        assert at >= 0, f"not printed, or not in this order: {line}\n{printed}"
        assert at == 0 or anywhere, f"printed before {line!r} and not shown: {rest[:at]}"
        rest, anywhere = rest[at + 1 :], False
