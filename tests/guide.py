"""Reads ``docs/write-a-backend.md``: the files that it grows, block by block, and the commands that it shows.

Not a test itself.  A fenced block whose first line names a file belongs to that file.  A new file is the block as it
stands.  A further block for a Python file adds its imports, classes, functions and constants, and replaces those that
the file has under the same name; a class that the file has gets the block's methods in the same way.  A ``console``
block is a command and the lines that it prints, with ``...`` for any lines left out.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Written:
    """A block that belongs to a file."""

    path: str
    text: str


@dataclass(frozen=True)
class Shown:
    """A command, and what it prints."""

    command: str
    lines: tuple[str, ...]


def blocks(guide: Path) -> Iterator[Written | Shown]:
    """In the order of the page.  Raises ``ValueError`` for a block that is neither."""
    for kind, path, text in _FENCE.findall(guide.read_text(encoding="utf-8")):
        if path:
            yield Written(path, text)
        elif kind == "console":
            command, *lines = text.splitlines()
            if not command.startswith("$ "):
                raise ValueError(f"a console block begins with a command: {command}")
            yield Shown(command[2:], tuple(lines))
        else:
            raise ValueError(f"a {kind} block that names no file: {text.splitlines()[0]}")


def write(block: Written, folder: Path) -> None:
    """Bring a block into its file under ``folder``."""
    file = folder / block.path
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.exists():
        if file.suffix != ".py":
            raise ValueError(f"{block.path} is written twice")
        file.write_text(_merged(file.read_text(encoding="utf-8"), block.text), encoding="utf-8")
    else:
        file.write_text(block.text, encoding="utf-8")


def _merged(old: str, new: str) -> str:
    tree, more = ast.parse(old), ast.parse(new)
    _merge(tree.body, more.body)
    return ast.unparse(tree) + "\n"


def _merge(body: list[ast.stmt], more: list[ast.stmt]) -> None:
    for node in more:
        name = name_of(node)
        at = next((number for number, known in enumerate(body) if name and name_of(known) == name), None)
        if at is None:
            body.insert(_place(body, node), node)
        elif isinstance(node, ast.ClassDef) and any(isinstance(inner, ast.FunctionDef) for inner in node.body):
            known = body[at]
            assert isinstance(known, ast.ClassDef)
            _merge(known.body, node.body)
        else:
            body[at] = node


def _place(body: list[ast.stmt], node: ast.stmt) -> int:
    """Imports follow imports; constants and classes stand above the connector, which uses them: the last class."""
    above = {ast.Import: 1, ast.ImportFrom: 1, ast.Assign: 0, ast.ClassDef: 0}.get(type(node))
    kinds = (ast.Import, ast.ImportFrom) if above else (ast.ClassDef,)
    there = [number for number, known in enumerate(body) if isinstance(known, kinds)]
    return there[-1] + above if there and above is not None else len(body)


def name_of(node: ast.stmt) -> str:
    """What a statement defines; empty where it defines nothing."""
    match node:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return name
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
            return name
    return ""


def definitions(source: str) -> dict[str, str]:
    """What a module defines, by name (``Class.method`` for methods), as text without comments and layout."""
    found: dict[str, str] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            methods = [inner for inner in node.body if isinstance(inner, ast.FunctionDef)]
            found |= {f"{node.name}.{method.name}": ast.unparse(method) for method in methods}
            node.body = [inner for inner in node.body if not isinstance(inner, ast.FunctionDef)] or [ast.Pass()]
            found[node.name] = ast.unparse(node)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {f"import {alias.name}": ast.unparse(node) for alias in node.names}
        elif name := name_of(node):
            found[name] = ast.unparse(node)
    return found
