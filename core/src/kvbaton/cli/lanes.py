"""``kvbaton lanes``: by which ways a transport moves bytes on this host."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from rich.markup import escape
from rich.table import Table

from kvbaton.cli.console import answers
from kvbaton.cli.memory import REMEDIES, memory_kind, with_memory
from kvbaton.connector import Lane, Need, WithLanes
from kvbaton.errors import CapabilityError, KvbatonError, TransportError
from kvbaton.plugins import choose_connector


def show(name: str, options: Mapping[str, Any], memory: str, *, as_json: bool) -> None:
    """Ask the transport and print what it says.

    Raises what :func:`~kvbaton.plugins.choose_connector` does, :class:`~kvbaton.errors.SettingsError` for memory that
    there is not, :class:`~kvbaton.errors.CapabilityError` for a transport that does not tell, and
    :class:`~kvbaton.errors.TransportError` where no byte went.
    """
    kind = memory_kind(memory)
    tries = f"{with_memory(f'kvbaton doctor {name}', kind)} tries it"
    remedies = replace(REMEDIES, process="ways are shown between two", within=tries)
    plugin, valid = choose_connector(name, Need(kind, "cross_process"), options, remedies)
    if not isinstance(plugin, WithLanes):
        raise CapabilityError(
            f"transport {plugin.name} does not say by which ways it moves bytes; {tries}",
            capability="lanes",
        )
    try:
        lanes = plugin.lanes(valid, kind)
    except KvbatonError:
        raise
    except Exception as error:  # a plugin's, of which an operator is told, not shown
        raise TransportError(
            f"transport {plugin.name} could not say by which ways it moves bytes: {type(error).__name__}: {error}."
            f" {tries}"
        ) from error
    if as_json:
        print(json.dumps([asdict(lane) for lane in lanes], indent=2))
        return
    table = Table(box=None, pad_edge=False)
    for column in ("operation", "from", "to", "bytes", "lane", "method"):
        table.add_column(column, no_wrap=True)
    for lane in lanes:
        cells = (lane.operation, lane.source, lane.target, _extent(lane), lane.lane, lane.method)
        table.add_row(*(escape(cell) for cell in cells))
    answers().print(table)


def _extent(lane: Lane) -> str:
    """``0 and more``, ``1 to 16515``, ``0``."""
    if lane.last is None:
        return f"{lane.first} and more"
    return str(lane.first) if lane.first == lane.last else f"{lane.first} to {lane.last}"
