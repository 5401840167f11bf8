"""``examples/library`` runs, each file as its first lines say."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

LIBRARY = Path(__file__).resolve().parents[2] / "examples" / "library"
#: What each prints, roughly; figures differ from run to run.
PRINTS = {
    "stream.py": r" Paris\.(.|\n)*bytes in \d+ chunks, length\n",
    "with_asyncio.py": r"The capital of France is ->' Paris\.(.|\n)*Water boils at ->(.|\n)*",
    "observer.py": r"(.|\n)*request \S+: \d+ bytes in \d+ chunks\n(.|\n)*received [\d.]+ ms after the last chunk.*\n",
    "policy.py": r"anna/1 was decoded by (decode-\d)\nanna/2 was decoded by \1\nbert/1 was decoded by decode-\d\n",
}


def test_each_example_is_run() -> None:
    assert {file.name for file in LIBRARY.glob("*.py")} == set(PRINTS)


@pytest.mark.parametrize("name", PRINTS)
def test_an_example_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    # in this process, so that torch is loaded once
    spec = importlib.util.spec_from_file_location(f"example_{name[:-3]}", LIBRARY / name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main()
    printed = capsys.readouterr().out
    assert re.fullmatch(PRINTS[name], printed), printed
