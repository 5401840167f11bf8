"""The settings, from the model that reads them, and the options of each installed transport and engine."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ByteSize
from pydantic_core import PydanticUndefined

from kvbaton.settings import ENVIRONMENT_PREFIX, Settings

ROOT = Path(__file__).resolve().parents[2]
ABOUT = (
    f"A setting is given in a file (`--config kvbaton.toml`), as a variable (`{ENVIRONMENT_PREFIX}` and the key in"
    " capitals, levels joined by two underscores: `KVBATON_TRANSFER__CHUNK_BYTES=64MiB`), or as a flag (`--set"
    " transfer.chunk_bytes=64MiB`); the later wins over the earlier. Sizes in bytes take a unit; times are seconds."
    " `kvbaton config` shows each effective value and where it came from."
)


def page() -> str:
    """Every setting with its default and its description, as Markdown."""
    parts = [
        "# Settings", "",
        "Made from the model that reads them when this site was built; `kvbaton config --schema` prints the same.", "",
        ABOUT, "",
    ]  # fmt: skip
    top = [(name, field) for name, field in Settings.model_fields.items() if not _group(field.annotation)]
    parts += ["## At the top", "", *_table(iter(top), ""), ""]
    for name, field in Settings.model_fields.items():
        model = _group(field.annotation)
        if model is not None:
            about = " ".join((model.__doc__ or "").split())
            parts += [f"## {name}", "", about, "", *_table(iter(model.model_fields.items()), f"{name}."), ""]
    for kind, group in (("transport", "kvbaton.connectors"), ("engine", "kvbaton.engines")):
        for name, options in _plugins(group):
            parts += [f"## {kind}.options of {name}", ""]
            fields = list(options.model_fields.items())
            parts += _table(iter(fields), f"{kind}.options.") if fields else ["It has none."]
            parts.append("")
    return "\n".join(parts)


def _plugins(group: str) -> Iterator[tuple[str, type[BaseModel]]]:
    """The plugins of ``plugins/``, by entry point: neither an example's nor a stranger's."""
    from importlib.metadata import entry_points

    ours = {tomllib.loads(file.read_text())["project"]["name"] for file in ROOT.glob("plugins/*/pyproject.toml")}
    for entry in sorted(entry_points(group=group), key=lambda entry: entry.name):
        if entry.dist is not None and entry.dist.name in ours:
            yield entry.name, entry.load().Options


def _group(annotation: Any) -> type[BaseModel] | None:
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _table(fields: Iterator[tuple[str, Any]], prefix: str) -> list[str]:
    rows = ["| setting | default | what it is |", "| --- | --- | --- |"]
    for name, field in fields:
        about = " ".join((field.description or "").split()).replace("|", "\\|")
        rows.append(f"| `{prefix}{name}` | {_default(field)} | {about} |")
    return rows


def _default(field: Any) -> str:
    default = field.get_default(call_default_factory=True)
    if default is PydanticUndefined:
        return "*needed*"
    if default is None:
        return "*unset*"
    if isinstance(default, ByteSize) or (isinstance(default, int) and ByteSize in _parts(field.annotation)):
        return f"`{ByteSize(default).human_readable()}`"
    if isinstance(default, Path):
        return f"`{default}`"
    if isinstance(default, BaseModel):
        return "see there"
    if isinstance(default, (set, frozenset)):
        default = sorted(default)
    return f"`{json.dumps(default)}`"


def _parts(annotation: Any) -> tuple[Any, ...]:
    return (annotation, *getattr(annotation, "__args__", ()))


def write(file: Path) -> None:
    """Write the page."""
    file.write_text(page() + "\n", encoding="utf-8")
