"""Who is meant: transfers, peers and requests.

Three kinds of names that are never confused (C1): a *request* carries the id its user chose and may reuse; a *transfer*
is one admission of one request and is never reused; a *peer* is one process lifetime of one stage.
All values are immutable, hashable and safe to share between threads.
"""

from __future__ import annotations

import time
import uuid
from typing import Annotated, NewType

import msgspec

#: An external request id, chosen by the user.  Free for reuse as soon as its request is terminal for the caller (C1.1).
RequestKey = NewType("RequestKey", str)

#: One admission of one request: a fresh UUID4 as 32 lower-case hexadecimal characters (C1.2).
TransferId = NewType("TransferId", str)

#: What a ``TransferId`` looks like on the wire; a message with anything else is refused while decoding (C9.3).
#: (``$`` would let a line feed through behind them.)
WireTransferId = Annotated[TransferId, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]


def new_transfer_id() -> TransferId:
    """A transfer id that no other transfer has, or ever had, anywhere."""
    return TransferId(uuid.uuid4().hex)


class PeerId(msgspec.Struct, frozen=True, order=True, forbid_unknown_fields=True):
    """One process lifetime of one stage: its configured name and the epoch of this start (C1.4).

    Epochs of one name grow with every start, so that an older one can be told from a newer one.
    """

    name: str
    epoch: int

    @classmethod
    def start(cls, name: str) -> PeerId:
        """The identity of a stage that starts now."""
        return cls(name, time.time_ns())

    def __str__(self) -> str:
        return f"{self.name}@{self.epoch:x}"
