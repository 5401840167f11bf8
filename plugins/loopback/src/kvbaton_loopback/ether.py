"""What the connectors of one process share: a lock, and a way to find each other."""

from __future__ import annotations

import itertools
import os
import threading
import uuid
from typing import TYPE_CHECKING

import msgspec

from kvbaton.errors import ConnectError
from kvbaton.identity import PeerId

if TYPE_CHECKING:
    from kvbaton_loopback.connector import LoopbackConnector


class Address(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a connector is: which process (a pid alone may come again), and which connector of it.  Endpoint
    metadata.
    """

    pid: int
    process: str
    number: int

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)


class Ether:
    """The connectors of this process.

    ``lock`` guards all bookkeeping of all of them.  It is held for moments only, never while bytes are copied, and each
    connector's and each wire's condition variable is made of it.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._process = uuid.uuid4().hex
        self._numbers = itertools.count()
        self._present: dict[int, LoopbackConnector] = {}

    def join(self, connector: LoopbackConnector) -> Address:
        """``connector`` can be found from now on."""
        with self.lock:
            number = next(self._numbers)
            self._present[number] = connector
        return Address(os.getpid(), self._process, number)

    def leave(self, address: Address) -> None:
        """It cannot any more.  The caller holds the lock."""
        self._present.pop(address.number, None)

    def find(self, peer: PeerId, metadata: bytes) -> LoopbackConnector:
        """The connector of ``peer``.  The caller holds the lock.  Raises :class:`~kvbaton.errors.ConnectError`."""
        try:
            address = msgspec.msgpack.decode(metadata, type=Address)
        except msgspec.MsgspecError as error:
            raise ConnectError(f"T2: {peer} did not send a loopback address: {error}", peer=peer) from error
        # after a fork the token is the parent's too, the pid is not
        if (address.pid, address.process) != (os.getpid(), self._process):
            raise ConnectError(
                f"T2: {peer} lives in process {address.pid}, this is process {os.getpid()}: loopback reaches its own"
                " process only; run the stages in one process or choose another transport",
                peer=peer,
            )
        found = self._present.get(address.number)
        if found is None or found.peer != peer:
            raise ConnectError(f"T2: {peer} has closed its connector; connect to its present epoch", peer=peer)
        return found


#: The one of this process.
ETHER = Ether()
