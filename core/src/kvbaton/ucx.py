"""What plugins over UCX have in common: what its settings are called, and what keeps it from a way.  Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from kvbaton.connector import SelfTest

#: UCX's other names for a way, which stand for several.
_ALIASES: Final = {"cuda_ipc": {"cuda"}, "cuda_copy": {"cuda"}, "cma": {"sm", "shm"}}
#: A setting, without the prefix that it has as a variable.
_SETTING: Final = re.compile(r"[A-Z][A-Z0-9_]*")


def check_names(settings: Mapping[str, str]) -> None:
    """Raises ``ValueError`` for what UCX would not take for a setting, or only with another prefix."""
    for name in settings:
        if name.startswith("UCX_"):
            raise ValueError(f"write {name.removeprefix('UCX_')!r}: the prefix UCX_ is added")
        if not _SETTING.fullmatch(name):
            raise ValueError(f"{name!r} is no setting of UCX: they are capital letters, digits and underscores")


def left_out(wanted: Sequence[str], option: str | None, found: SelfTest) -> str:
    """How UCX's settings keep it from some of the ``wanted`` ways, and what to set; empty where they do not.

    ``option`` is the transport's ``options.ucx["TLS"]``, which overrides the variable ``UCX_TLS``.
    """
    where, ways = 'options.ucx, "TLS"', option
    if ways is None:
        where, ways = "UCX_TLS", found.environment.get("UCX_TLS")
    if ways is None:
        return ""
    missing = _missing(ways, wanted)
    if not missing:
        return ""
    return f"{where} is {ways} and leaves {' and '.join(missing)} out: unset it, or set {_with(ways, wanted)}"


def out_of_reach(found: SelfTest) -> str:
    """That the two devices do not reach each other's memory, and what to do; empty where they may."""
    if found.peer_access is not False:
        return ""
    one, other = found.devices
    return f"devices {one} and {other} do not reach each other's memory (nvidia-smi topo -p2p rw): choose two that do"


def _missing(ways: str, wanted: Sequence[str]) -> list[str]:
    names = set(ways.removeprefix("^").split(","))
    named = [way for way in wanted if names & ({way} | _ALIASES.get(way, set()))]
    if ways.startswith("^"):
        return named
    return [] if "all" in names else [way for way in wanted if way not in named]


def _with(ways: str, wanted: Sequence[str]) -> str:
    if ways.startswith("^"):
        refused = {*wanted}.union(*(_ALIASES.get(way, set()) for way in wanted))
        rest = [name for name in ways.removeprefix("^").split(",") if name not in refused]
        return f"^{','.join(rest)}" if rest else "all"
    return ",".join(dict.fromkeys([*ways.split(","), *wanted]))
