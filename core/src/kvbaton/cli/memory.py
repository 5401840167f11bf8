"""``--memory``, which several commands have: what may be written, and what they say of a transport that has another."""

from __future__ import annotations

from typing import Final

from kvbaton.connector import MemoryKind
from kvbaton.errors import SettingsError
from kvbaton.plugins import Remedies

#: What others call them.
_MEANT: Final = {"cpu": "host", "ram": "host", "dram": "host", "gpu": "cuda", "device": "cuda", "hbm": "cuda"}

#: Of a command that takes its memory from the flag.
REMEDIES: Final = Remedies(
    host="write --memory host or choose another transport", cuda="write --memory cuda or choose another transport"
)


def memory_kind(text: str) -> MemoryKind:
    """What the flag says.  Raises :class:`~kvbaton.errors.SettingsError`."""
    if text == "host":
        return "host"
    if text == "cuda":
        return "cuda"
    meant = _MEANT.get(text.lower().partition(":")[0], "host or cuda")
    raise SettingsError(f"--memory {text}: write {meant}", key="", origin=None)


def with_memory(command: str, memory: MemoryKind) -> str:
    """``command`` so that it looks at that memory."""
    return command if memory == "host" else f"{command} --memory {memory}"
