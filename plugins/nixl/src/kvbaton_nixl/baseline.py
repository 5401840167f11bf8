"""NIXL's own API, for ``kvbaton bench`` to set beside what kvbaton makes of it; nothing else uses this.

As NIXL's manual says is fastest: descriptor lists prepared once, for each chunk a write made from index arrays, handles
polled in a loop.  Each write carries a notification as long as one of kvbaton's words, by which the target knows.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from kvbaton.connector import MemoryRegion
from kvbaton.errors import TransportError
from kvbaton.segments import Segments
from kvbaton_nixl import library
from kvbaton_nixl.descriptors import SPACES, AddressBook
from kvbaton_nixl.options import NixlOptions
from kvbaton_nixl.words import Region

_NOTE = b"x" * 48


class _Card(msgspec.Struct, frozen=True, array_like=True):
    agent: bytes
    regions: tuple[Region, ...]


class RawNixl:
    """See :class:`~kvbaton.bench.baseline.Baseline`."""

    name = "NIXL's own API"
    tells = True

    def __init__(self, options: NixlOptions, regions: Sequence[MemoryRegion]) -> None:
        self._agent = library.make_agent(f"raw-{os.getpid()}", options)
        self._book = AddressBook.of(regions)
        self._space = SPACES[self._book.kind]
        rows = [(region.address, region.length, region.device, "") for region in regions]
        self._registered = self._agent.register_memory(rows, self._space)
        self._regions = tuple(Region(r.id, r.kind, r.device, r.address, r.length) for r in regions)
        self._lists: list[Any] = []
        self._pieces: list[Any] = []

    def address(self) -> bytes:
        return msgspec.msgpack.encode(_Card(self._agent.get_agent_metadata(), self._regions))

    def meet(self, peer: bytes) -> None:
        card = msgspec.msgpack.decode(peer, type=_Card)
        name = self._agent.add_remote_agent(card.agent)
        self._peer = name.decode() if isinstance(name, bytes) else name
        self._there = AddressBook.of(card.regions)

    def prepare_source(self, chunks: Sequence[tuple[Segments, Segments]]) -> None:
        self._forget()
        here = np.concatenate([self._book.rows(reads) for reads, _ in chunks])
        there = np.concatenate([self._there.rows(writes) for _, writes in chunks])
        self._lists = [
            self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", self._agent.get_xfer_descs(here, self._space)),
            self._agent.prep_xfer_dlist(self._peer, self._agent.get_xfer_descs(there, self._space)),
        ]
        ends = np.cumsum([len(reads) for reads, _ in chunks])
        self._pieces = [
            np.arange(end - len(reads), end, dtype=np.int32) for end, (reads, _) in zip(ends, chunks, strict=True)
        ]

    def prepare_target(self, writes: Sequence[Segments]) -> None:
        """One-sided: the source says where."""

    def begin(self) -> None:
        """One-sided: nothing is posted at the target."""

    def move(self) -> None:
        ours, theirs = self._lists
        waiting = []
        for piece in self._pieces:
            handle = self._agent.make_prepped_xfer("WRITE", ours, piece, theirs, piece, _NOTE)
            self._agent.transfer(handle)
            waiting.append(handle)
        while waiting:
            still = []
            for handle in waiting:
                state = self._agent.check_xfer_state(handle)
                if state == "DONE":
                    handle.release()
                elif state == "ERR":
                    raise TransportError("NIXL's own API: a write failed")
                else:
                    still.append(handle)
            if len(still) == len(waiting):
                os.sched_yield()
            waiting = still

    def arrived(self) -> int:
        return sum(len(notes) for notes in self._agent.get_new_notifs().values())

    def close(self) -> None:
        self._forget()
        self._agent.deregister_memory(self._registered)
        if hasattr(self, "_peer"):
            self._agent.remove_remote_agent(self._peer)

    def _forget(self) -> None:
        for old in self._lists:
            old.release()
        self._lists = []
