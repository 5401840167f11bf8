"""The workspace as its rules see it: the distributions, their files, their imports.  Not a test itself."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Distribution:
    folder: Path
    content: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.content["project"]["name"])

    @property
    def package(self) -> str:
        return self.name.replace("-", "_")

    @property
    def source(self) -> Path:
        return self.folder / "src" / self.package

    @property
    def is_plugin(self) -> bool:
        return self.folder.parent.name == "plugins"

    def requirements(self) -> list[str]:
        project = self.content["project"]
        extras = project.get("optional-dependencies", {}).values()
        return [*project.get("dependencies", ()), *(line for extra in extras for line in extra)]


def distributions() -> list[Distribution]:
    places = ("*", "plugins/*", "examples/third_party_*")
    files = sorted(file for place in places for file in ROOT.glob(f"{place}/pyproject.toml"))
    return [Distribution(file.parent, tomllib.loads(file.read_text())) for file in files]


def workspace_settings() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def python_files(*folders: Path) -> Iterator[Path]:
    for folder in folders:
        yield from sorted(path for path in folder.rglob("*.py") if not any(part.startswith(".") for part in path.parts))


def imports(file: Path) -> Iterator[tuple[int, str]]:
    """Line and top-level name of every absolute import in a file, however deep it stands, and of each
    ``import_module("...")`` of a literal name."""
    for node in ast.walk(ast.parse(file.read_text(), str(file))):
        match node:
            case ast.Import(names=names):
                for alias in names:
                    yield node.lineno, alias.name.split(".")[0]
            case ast.ImportFrom(module=str(module), level=0):
                yield node.lineno, module.split(".")[0]
            case ast.Call(
                func=ast.Attribute(attr="import_module") | ast.Name(id="import_module"),
                args=[ast.Constant(value=str(module)), *_],
            ):
                yield node.lineno, module.split(".")[0]
