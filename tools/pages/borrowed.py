"""Pages that stand elsewhere in the repository and are pages of the site as well: each distribution's own README.

Also: where links of a page lead when the page is part of the site: in a clone they lead to what is in the clone, never
into ``docs/generated``.  A link to a file of the repository leads to that
file as it was when the site was built; one to a folder is only its name, unless ``repository`` says where the sources
are to be read.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
GENERATED = DOCS / "generated"

#: File of the repository, and the name of its page.
PAGES = {
    "plugins/loopback/README.md": "loopback",
    "plugins/nixl/README.md": "nixl",
    "plugins/cuda_ipc/README.md": "cuda-ipc",
    "plugins/transformers/README.md": "transformers",
    "conformance/README.md": "conformance",
    "CONTRIBUTING.md": "contributing",
}
#: What a page of the site is made from, or a copy that is kept in the repository, and the page.
MADE = {
    "core/src/kvbaton/settings.py": "settings.md",
    "tools/pages/clause_tests.py": "clauses.md",
    "benchmarks/results/results.md": "performance.md",
    "benchmarks/results/notes.md": "performance.md",
    "docs/idea.svg": "idea.svg",
}
_LINK = re.compile(r"(?P<text>!?\[(?:[^\[\]]|\[[^\]]*\])*\])\((?P<target>[^()\s#]+)(?P<anchor>#[^()\s]*)?\)")
_FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)


def write_all(repository: str = "") -> None:
    """Each borrowed page as ``docs/generated/NAME.md``, its links made relative to there."""
    for source, name in PAGES.items():
        path = ROOT / source
        if path.exists():
            text = relinked(path.read_text(encoding="utf-8"), path.parent, GENERATED, repository)
            (GENERATED / f"{name}.md").write_text(text, encoding="utf-8")


def relinked(text: str, stands: Path, shown: Path, repository: str = "") -> str:
    """``text`` of a page in folder ``stands``, with its links as they must be in folder ``shown`` of the site."""
    parts, at = [], 0
    for fence in _FENCE.finditer(text):  # code stays as it is
        parts += [_relink(text[at : fence.start()], stands, shown, repository), fence.group()]
        at = fence.end()
    return "".join([*parts, _relink(text[at:], stands, shown, repository)])


def _relink(text: str, stands: Path, shown: Path, repository: str) -> str:
    def moved(link: re.Match[str]) -> str:
        target, anchor = link["target"], link["anchor"] or ""
        if "://" in target or target.startswith("mailto:"):
            return link.group()
        path = Path(os.path.normpath(stands / target))
        if not path.is_relative_to(ROOT) or not path.exists():
            return link.group()  # the builder will say that it leads nowhere
        name = path.relative_to(ROOT).as_posix()
        if name in PAGES or f"{name}/README.md" in PAGES:
            page = PAGES.get(name) or PAGES[f"{name}/README.md"]
            return f"{link['text']}({_from(shown, GENERATED / f'{page}.md')}{anchor})"
        if name == "docs/README.md":
            return f"{link['text']}({_from(shown, DOCS / 'index.md')})"
        if name in MADE:
            return f"{link['text']}({_from(shown, GENERATED / MADE[name])})"
        if path.is_relative_to(DOCS):
            return f"{link['text']}({_from(shown, path)}{anchor})"
        if repository:
            return f"{link['text']}({repository.rstrip('/')}/blob/main/{name}{anchor})"
        if path.is_dir() or path.suffix == ".md":  # a page that is not in the site
            words = link["text"][1:-1]
            return words if f"`{name}`" in words or words == f"`{name}`" else f"{words} (`{name}`)"
        return f"{link['text']}({_from(shown, path)})"

    return _LINK.sub(moved, text)


def _from(folder: Path, target: Path) -> str:
    return os.path.relpath(target, folder).replace(os.sep, "/")
