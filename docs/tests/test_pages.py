"""The code and the commands of the README and of every page run, and print what the page shows.

Python blocks of a page share one namespace; console blocks one folder, in which ``examples/`` is to be found; a TOML
block must be settings that kvbaton takes, and is ``kvbaton.toml`` for the commands below it.  A block whose fence names
a file is that file.  A block that cannot run here says so, with the reason, in a comment above it:

    <!-- skip: next "it needs two GPUs" -->
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from unittest import SkipTest

import pytest
from sybil import Document, Example, Region, Sybil
from sybil.evaluators.skip import Skipper
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser, SkipParser
from sybil.parsers.markdown.lexers import FencedCodeBlockLexer

from kvbaton.settings import load

from . import console

ROOT = Path(__file__).resolve().parents[2]
#: Pages whose blocks are run elsewhere.
ELSEWHERE = {
    "docs/write-a-backend.md": "tests/test_write_a_backend.py grows its package and runs its commands",
}
PAGES = [
    ROOT / "README.md",
    *sorted(page for page in (ROOT / "docs").glob("*.md") if page.relative_to(ROOT).as_posix() not in ELSEWHERE),
]
#: Languages of blocks that are no code of ours: pictures, text as it is, settings of other programs.
PROSE = {"mermaid", "text", "yaml", "{toctree}", "{literalinclude}"}


def run_commands(example: Example) -> None:
    console.run(str(example.parsed), folder_of(example.document))


def take_settings(example: Example) -> None:
    file = folder_of(example.document) / "kvbaton.toml"
    file.write_text(str(example.parsed), encoding="utf-8")
    load(file, defaults={"model": "smollm2"})


def folder_of(document: Document) -> Path:
    folder = document.namespace["folder"]
    assert isinstance(folder, Path)
    return folder


def files(document: Document) -> Iterator[Region]:
    """Blocks whose fence names a file."""

    def write(example: Example) -> None:
        language, path = str(example.parsed[0]).split()
        file = folder_of(example.document) / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(example.parsed[1], encoding="utf-8")
        if language == "python":
            compile(example.parsed[1], path, "exec")

    for block in FencedCodeBlockLexer(r"\w+ \S+")(document):
        yield Region(block.start, block.end, (block.lexemes["language"], block.lexemes["source"]), write)


SYBIL = Sybil(
    [
        PythonCodeBlockParser(future_imports=["annotations"]),
        CodeBlockParser("console", run_commands),
        CodeBlockParser("toml", take_settings),
        files,
        SkipParser(),
    ]
)
DOCUMENTS = {page: SYBIL.parse(page) for page in PAGES}


def blocks(document: Document) -> Iterator[list[Example]]:
    """Each block of a page, behind the directives that are about it."""
    together: list[Example] = []
    for example in document.examples():
        together.append(example)
        if not isinstance(example.region.evaluator, Skipper):
            yield together
            together = []


BLOCKS = [
    pytest.param(page, together, id=f"{page.relative_to(ROOT).as_posix()}:{together[-1].line}")
    for page, document in DOCUMENTS.items()
    for together in blocks(document)
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Path]:
    """A folder for the commands of each page."""
    made = {}
    for page in PAGES:
        made[page] = tmp_path_factory.mktemp(page.stem)
        (made[page] / "examples").symlink_to(ROOT / "examples")
    return made


@pytest.mark.timeout(300)  # a machine that runs everything else meanwhile
@pytest.mark.parametrize(("page", "together"), BLOCKS)
def test_a_block_does_what_its_page_says(
    page: Path, together: list[Example], folders: dict[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folders[page])
    together[-1].document.namespace["folder"] = folders[page]
    try:
        for example in together:
            example.evaluate()
    except SkipTest as reason:
        pytest.skip(f"not run: {reason}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_block_is_of_a_kind_that_is_run(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    kinds = re.findall(r"^```([^\n`]*)\n(?:.*?\n)?```$", text, re.MULTILINE | re.DOTALL)
    known = {"python", "console", "toml", "", *PROSE}
    wrong = [kind for kind in kinds if kind.split(" ")[0] not in known]
    assert not wrong, f"{page.name}: blocks of these kinds are not run: {wrong}"
    bare = re.findall(r"^\n {4}(?:\$|kvbaton|python|pip|tox)\b.*$", text, re.MULTILINE)
    assert not bare, f"{page.name}: commands stand in console blocks, where they are run: {bare}"


def test_what_is_run_elsewhere_is_there() -> None:
    for page, why in ELSEWHERE.items():
        assert (ROOT / page).exists()
        assert (ROOT / why.split()[0]).exists()


@pytest.mark.parametrize(
    ("shown", "printed", "alike"),
    [
        (["one  1.5 s", "..."], "one 203.75 s\nmore\n", True),
        (["one 3"], "one 4\n", False),
        (["a ... c"], "a b b c\n", True),
        (["...", "last"], "first\nlast\n", True),
        (["last"], "first\nlast\n", False),
        (["first"], "first\nlast\n", False),
        (["two", "one"], "one\ntwo\n", False),
    ],
)
def test_what_is_printed_is_compared_with_what_is_shown(shown: list[str], printed: str, alike: bool) -> None:
    if alike:
        console.compare(console.Command("x", shown), printed)
    else:
        with pytest.raises(console.NotAsShown):
            console.compare(console.Command("x", shown), printed)
