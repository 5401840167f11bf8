"""Every link of a page leads somewhere in a clone, where no site has been built."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
_FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?P<target>[^()\s#]+)(?:#[^()\s]*)?\)")


def tool(name: str) -> ModuleType:
    """A module of ``tools/pages``, which is no package that is installed."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / "pages" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pages() -> Iterator[Path]:
    made = ("generated", "_build", "build", "dist", "venv", "htmlcov", "shared")  # not of the repository
    for page in sorted(ROOT.rglob("*.md")):
        parts = page.relative_to(ROOT).parts
        if not any(part.startswith(".") or part in made for part in parts):
            yield page


def test_every_link_leads_to_what_is_in_a_clone() -> None:
    lost = []
    for page in pages():
        # a fragment of the changelog becomes a part of CHANGELOG.md, at the root
        stands = ROOT if page.parent.name == "changelog.d" else page.parent
        for link in _LINK.finditer(_FENCE.sub("", page.read_text(encoding="utf-8"))):
            target = unquote(link["target"])
            if re.match(r"[a-z]+:", target):
                continue
            path = (stands / target).resolve()
            made = path.is_relative_to(DOCS / "generated") or path.is_relative_to(DOCS / "_build")
            if made or not path.exists():
                lost.append(f"{page.relative_to(ROOT)}: {target}")
    assert not lost, "in the site a link to what a page is made from leads to that page (tools/pages/borrowed.py)"


def test_in_the_site_they_lead_to_the_pages_that_are_made() -> None:
    borrowed = tool("borrowed")
    for source, page in {**borrowed.MADE, **{file: f"{name}.md" for file, name in borrowed.PAGES.items()}}.items():
        assert (ROOT / source).exists(), source
        target = f"../{source}"
        assert borrowed.relinked(f"[it]({target})", DOCS, DOCS) == f"[it](generated/{page})"


def test_the_picture_of_the_idea_is_that_which_is_drawn() -> None:
    """Its words, since another matplotlib draws the same picture with other bytes."""
    idea = tool("idea")
    said = re.findall(r"<text[^>]*>([^<]*)</text>", (DOCS / "idea.svg").read_text(encoding="utf-8"))
    words = [*idea.LANES.values(), *(word for *_, word in idea.WORDS)]
    words += [what for *_, what in (*idea.HOLDS, *idea.COMPUTES)]
    assert sorted(said) == sorted([*words, "bytes", "time"]), "python -m tools.pages.idea draws it"
