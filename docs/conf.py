"""The site: Sphinx over these pages, with furo and MyST.  ``tox -e docs`` builds it and runs the code of its pages.

Pages that nobody types are made by ``tools/pages`` into ``docs/generated`` when the site is built: the settings, the
clauses with their tests, the measured figures, the pictures, and the READMEs of the distributions.
"""

from __future__ import annotations

import os
import re
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools.pages import borrowed, clause_tests, idea, measured, settings_reference, state_diagrams  # noqa: E402

project = "kvbaton"
author = copyright = "The kvbaton authors"  # noqa: A001
version = release = tomllib.loads((ROOT / "core" / "pyproject.toml").read_text())["project"]["version"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode", "sphinx_copybutton"]
exclude_patterns = ["README.md", "_build"]
templates_path: list[str] = []
#: Where the sources are to be read, such as https://HOST/OWNER/kvbaton; then links to folders lead there.
REPOSITORY = os.environ.get("KVBATON_REPOSITORY", "")

# -- what is read ------------------------------------------------------------------------------------------------------

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4

# Names of our own must lead somewhere; those of others have no inventory here, because a build needs no network.
nitpicky = True
nitpick_ignore_regex = [
    (r"py:.*", r"(?!kvbaton).*"),
    # what a signature or a base class names and no page describes: private, a type variable, or inside of core
    (r"py:.*", r"kvbaton(_\w+)?\.(.*\.)?(_.*|[A-Z]|Phase|Annotated)"),
    (r"py:class", r"kvbaton\.service\.Service|kvbaton_conformance\.witness\..*"),
]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_default_options = {"members": True}

copybutton_prompt_text = r"\$ |host\d\$ "
copybutton_prompt_is_regexp = True

# -- how it looks ------------------------------------------------------------------------------------------------------

html_theme = "furo"
html_title = f"kvbaton {release}"
html_theme_options: dict[str, Any] = {"source_repository": f"{REPOSITORY}/"} if REPOSITORY else {}
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sphinx = False

# -- what is made ------------------------------------------------------------------------------------------------------

_MERMAID = re.compile(r"^```mermaid\n.*?^```$", re.MULTILINE | re.DOTALL)
_GLOB = re.compile(r"^(\w+\*)\n", re.MULTILINE)


def make(_app: Any) -> None:
    """Everything under ``docs/generated``."""
    borrowed.GENERATED.mkdir(exist_ok=True)
    borrowed.write_all(REPOSITORY)
    idea.draw(borrowed.GENERATED / "idea.svg")
    state_diagrams.draw_all(borrowed.GENERATED)
    settings_reference.write(borrowed.GENERATED / "settings.md")
    (borrowed.GENERATED / "clauses.md").write_text(clause_tests.page(), encoding="utf-8")
    (borrowed.GENERATED / "performance.md").write_text(measured.page(borrowed.GENERATED, REPOSITORY), encoding="utf-8")


def read(app: Any, docname: str, source: list[str]) -> None:
    """Pages of the repository as pages of the site: their links, and drawn pictures for diagrams that need a net."""
    page = Path(app.env.doc2path(docname))
    if page.suffix != ".md" or page.is_relative_to(borrowed.GENERATED):
        return
    if docname == "index":  # a pattern of a toctree that nothing matches is a warning
        source[0] = _GLOB.sub(lambda line: line[0] if any(page.parent.glob(f"{line[1]}.md")) else "", source[0])
        source[0] = source[0].replace("OTHERS\n", _others(source[0], page.parent))
    text = borrowed.relinked(source[0], page.parent, page.parent, REPOSITORY)
    if docname == "protocol":
        text = _drawn(text)
    source[0] = text


def _others(index: str, folder: Path) -> str:
    """Pages that no list of the index names or matches, so that a new page is in the site at once."""
    listed = re.findall(r"^([\w*/-]+)$", index, re.MULTILINE)
    pages = [page.stem for page in sorted(folder.glob("*.md")) if page.stem not in ("README", "index")]
    return "".join(f"{page}\n" for page in pages if not any(fnmatch(page, pattern) for pattern in listed))


def _drawn(text: str) -> str:
    names = iter(name for name, _, _ in state_diagrams.MACHINES)
    shown = "Each arrow is a legal transition, with the first of the events that make it; the table has them all."
    return _MERMAID.sub(lambda _: f"![state diagram](generated/{next(names)}.svg)\n\n{shown}", text)


def setup(app: Any) -> None:
    app.connect("builder-inited", make)
    app.connect("source-read", read)
