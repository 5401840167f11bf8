"""The wire of the control plane: typed, versioned messages in three disjoint families (C9.1, C9.3).

*Transfer* messages are about exactly one transfer; *peer* messages about a stage's life; *control* messages are
generic calls with ids of their own (C1.5).  Each family is its own tagged union with its own decoder: a decoder of one
cannot accept a message of another.  Decoding is strict: an unknown tag, an unknown or missing field, a wrong type, a
foreign version or too many bytes raise :class:`~kvbaton.errors.MessageError` and nothing else.  Nothing here executes
what it reads.

The topology is a star: the coordinator C is one end of every channel, a prefill stage P or a decode stage D the other.
``docs/protocol.md`` has the meaning of each message; the machines in :mod:`kvbaton.handoff` have the rules.

All values are immutable and safe to share between threads.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, TypeAlias, get_args

import msgspec

from kvbaton.bounds import MAX_MESSAGE_BYTES as MAX_MESSAGE_BYTES
from kvbaton.engine import FinishReason, Request, Role
from kvbaton.errors import LocalProtocolError, MessageError
from kvbaton.identity import PeerId, WireTransferId
from kvbaton.reservation import Capacity, Reservation

#: The version of this vocabulary.  Both ends of a channel speak the same one; another one is refused.
VERSION: Final = 1

#: Entries in ``Failed.missing``; what does not fit is left out.
MAX_MISSING: Final = 64

Family = Literal["transfer", "peer", "control"]

#: Milestone to seconds since the sender received the message that created its record.  For display: no machine reads
#: it.
Timings: TypeAlias = dict[str, float]

#: Counts creating messages on one channel, from 1, when they are sent (C1.2).
Ordinal = Annotated[int, msgspec.Meta(ge=1)]


#: One argument of a generic call.
Argument: TypeAlias = bool | int | float | str | list[str]


class _Message(msgspec.Struct, frozen=True, tag=True, tag_field="type", forbid_unknown_fields=True):
    """A message: immutable, tagged with its name, strict about its fields."""


# -- transfer family --------------------------------------------------------------------------------------------------


class Reserve(_Message, frozen=True):
    """C to D: hold memory for ``transfer``; creates D's record.

    ``source``: the peer that will write; receipts from any other are refused (C7.2), and D grants to it before it says
    ``Reserved``.
    """

    transfer: WireTransferId
    ordinal: Ordinal
    request: Request
    source: PeerId


class Reserved(_Message, frozen=True):
    """D to C: memory is held, frozen and locally quiet (C2.2, C2.7)."""

    reservation: Reservation

    @property
    def transfer(self) -> WireTransferId:
        return self.reservation.transfer


class Rejected(_Message, frozen=True):
    """D to C: nothing is held; D's part is over before it began.  ``retry``: it could fit later (C2.6)."""

    transfer: WireTransferId
    cause: str
    retry: bool = False


class Prefill(_Message, frozen=True):
    """C to P: compute the prompt and send it into ``reservation`` at ``destination``; creates P's record."""

    transfer: WireTransferId
    ordinal: Ordinal
    request: Request
    reservation: Reservation
    destination: PeerId


class Progress(_Message, frozen=True):
    """P to C: ``chunks`` chunks were computed so far.  Renews a deadline; nothing else depends on it."""

    transfer: WireTransferId
    chunks: int


class Commit(_Message, frozen=True):
    """P to C to D: every chunk was submitted and there are ``count`` of them, at least one.

    ``segments``, ``nbytes``, ``cached`` (prompt tokens found in P's prefix cache) and ``timings`` are statistics: two
    commits are equal when their counts are (C7.1).
    """

    transfer: WireTransferId
    count: int
    segments: int = 0
    nbytes: int = 0
    timings: Timings = {}
    cached: int = 0


class Unproven(_Message, frozen=True):
    """P to C to D, of a transfer that ended early: of these chunks only the target is not known to be quiet, and no
    other one is written any more.

    ``chunks``: their sequences as runs ``[first, past)`` in order.
    """

    transfer: WireTransferId
    chunks: tuple[tuple[int, int], ...]


class Received(_Message, frozen=True):
    """D to C: the count is known and a receipt for every sequence below it is in (C4.2).

    Of a transfer that D holds after its Cancel: a receipt for every chunk that P could not prove is in (T3).
    """

    transfer: WireTransferId
    timings: Timings = {}


class Ack(_Message, frozen=True):
    """C to P: D has received everything, or all that P could not prove; P may retire when it is quiet (C4.1)."""

    transfer: WireTransferId


class Activated(_Message, frozen=True):
    """D to C: the request has a compute slot.  A milestone to show; no machine depends on it."""

    transfer: WireTransferId
    timings: Timings = {}


class Output(_Message, frozen=True):
    """D to C: new tokens; ``position`` counts output tokens from 0.  ``exit_depths`` is empty or as long as
    ``token_ids``.
    """

    transfer: WireTransferId
    position: int
    token_ids: tuple[int, ...]
    exit_depths: tuple[int, ...] = ()


class Finished(_Message, frozen=True):
    """D to C: the last output was sent; terminal for the caller.  D's device may still run."""

    transfer: WireTransferId
    reason: FinishReason


class Failed(_Message, frozen=True):
    """P or D to C: cannot complete here.  Early news, not a release: the sender keeps its memory and drains.

    ``missing``: sequences without evidence, at most :data:`MAX_MISSING`.  ``culprit``: a writer that may have hit
    memory it was not given; C treats it as lost.  ``unmoved``: it is the bytes that did not get there, not the request
    that cannot be served: another generation may do better.
    """

    transfer: WireTransferId
    cause: str
    missing: tuple[int, ...] = ()
    culprit: PeerId | None = None
    unmoved: bool = False


class Cancel(_Message, frozen=True):
    """C to P and D: stop.  P drains; D keeps what a writer may still touch (C5.2)."""

    transfer: WireTransferId


class Release(_Message, frozen=True):
    """C to D: no writer is left for this transfer: stop and free (C5.2)."""

    transfer: WireTransferId


class Retired(_Message, frozen=True):
    """P or D to C: the sender holds nothing of the transfer any more.  From P it is also "I write no more"."""

    transfer: WireTransferId
    timings: Timings = {}


# -- peer family ------------------------------------------------------------------------------------------------------


class Hello(_Message, frozen=True):
    """Stage to C, first on its channel: who it is, what it can hold and how it is reached (an encoded ``Endpoint``)."""

    peer: PeerId
    role: Role
    capacity: Capacity
    endpoint: bytes


class Connect(_Message, frozen=True):
    """C to stage: connect to the peer behind this encoded ``Endpoint``."""

    endpoint: bytes


class Connected(_Message, frozen=True):
    """Stage to C: the transport reports ``peer`` up: it accepted the stage's epoch (T2)."""

    peer: PeerId


class PeerDown(_Message, frozen=True):
    """Stage to C: the transport reports ``peer`` down.  From D with ``quiet`` it is a fence in one direction (C6.4)."""

    peer: PeerId
    quiet: bool
    cause: str = ""


class Disconnect(_Message, frozen=True):
    """C to stage: ``peer``'s process was joined; drain and close your end of its connection, then go on (C6.4)."""

    peer: PeerId


class Stop(_Message, frozen=True):
    """C to stage: cancel and drain everything, then exit.  The exit is joined; nothing announces it (C6.2)."""


class Fatal(_Message, frozen=True):
    """Stage to C: this stage must not go on (quarantine bound, broken clause), or cannot start; with ``settings`` the
    operator's settings are to blame."""

    cause: str
    settings: bool = False


# -- control family ---------------------------------------------------------------------------------------------------


class Call(_Message, frozen=True):
    """C to stage: a generic call (statistics, health, profiling).  Its ids are never looked up among transfers
    (C1.5).

    ``arguments``: what the method takes; the stage looks at each before it believes it.
    """

    control_id: str
    session_id: str
    method: str
    arguments: dict[str, Argument] = {}


class Reply(_Message, frozen=True):
    """Stage to C: the result of a call, or what went wrong (``error`` is then set and ``result`` is not) (C9.2)."""

    control_id: str
    session_id: str
    result: Any = None
    error: str | None = None


TransferMessage: TypeAlias = (
    Reserve | Reserved | Rejected | Prefill | Progress | Commit | Received | Ack | Activated | Output | Finished
    | Failed | Cancel | Release | Retired | Unproven
)  # fmt: skip
PeerMessage: TypeAlias = Hello | Connect | Connected | PeerDown | Disconnect | Stop | Fatal
ControlMessage: TypeAlias = Call | Reply
Message: TypeAlias = TransferMessage | PeerMessage | ControlMessage

#: Each family's message types.
FAMILIES: Final[dict[Family, tuple[type[Any], ...]]] = {
    "transfer": get_args(TransferMessage),
    "peer": get_args(PeerMessage),
    "control": get_args(ControlMessage),
}

_FAMILY_OF: Final[dict[type[Any], Family]] = {kind: family for family, kinds in FAMILIES.items() for kind in kinds}


class Envelope(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What goes on a channel: ``body`` with its family, the sender's ``epoch`` and ``seq``.

    ``seq`` counts on one channel in one direction from 1: a gap means that the peer is lost, a repeat is dropped
    (C9.4).
    """

    version: int
    family: Family
    epoch: int
    seq: int
    body: Message


class _Version(msgspec.Struct, frozen=True, array_like=True):
    """What every version begins with."""

    version: int


_ENCODER: Final = msgspec.msgpack.Encoder()
_ENVELOPE: Final = msgspec.msgpack.Decoder(Envelope)
_VERSION: Final = msgspec.msgpack.Decoder(_Version)
_BODY: Final[dict[Family, msgspec.msgpack.Decoder[Any]]] = {
    "transfer": msgspec.msgpack.Decoder(TransferMessage),
    "peer": msgspec.msgpack.Decoder(PeerMessage),
    "control": msgspec.msgpack.Decoder(ControlMessage),
}


def family_of(message: Message) -> Family:
    """The family a message belongs to."""
    return _FAMILY_OF[type(message)]


def envelope(epoch: int, seq: int, body: Message) -> Envelope:
    """``body`` in an envelope of this version and of its own family."""
    return Envelope(VERSION, _FAMILY_OF[type(body)], epoch, seq, body)


def encode(envelope: Envelope) -> bytes:
    """The bytes of one envelope.

    Raises :class:`~kvbaton.errors.LocalProtocolError` where the family is not the body's or a value cannot travel.
    """
    if _FAMILY_OF.get(type(envelope.body)) != envelope.family:
        raise LocalProtocolError(
            f"C9.1: a {type(envelope.body).__name__} is not a message of the {envelope.family} family"
        )
    try:
        return _ENCODER.encode(envelope)
    except (TypeError, OverflowError, ValueError) as error:
        raise LocalProtocolError(
            f"a {type(envelope.body).__name__} with a value that cannot travel: {error}"
        ) from error


def decode(data: bytes | bytearray | memoryview, max_bytes: int = MAX_MESSAGE_BYTES) -> Envelope:
    """The envelope in ``data``, every type and field checked.

    Raises :class:`~kvbaton.errors.MessageError`, and nothing else, for bytes that are not one: too many of them,
    another version, a family's name over another family's body, unknown or missing fields, wrong types, rubbish
    (C9.3).
    """
    size = len(data)
    if size > max_bytes:
        raise MessageError(f"C9.3: a message of {size} bytes, more than the {max_bytes} allowed (control.max_message)")
    try:
        found = _ENVELOPE.decode(data)
    # a hostile nesting exhausts the decoder's recursion, hostile text is not UTF-8
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError, ValueError) as error:
        _check_version(data)
        raise MessageError(f"C9.3: not a message: {error}") from error
    if found.version != VERSION:
        _check_version(data)
    if _FAMILY_OF[type(found.body)] != found.family:
        raise MessageError(f"C9.3: not a message: a {type(found.body).__name__} is not of the {found.family} family")
    return found


def _check_version(data: bytes | bytearray | memoryview) -> None:
    """Say so where what could not be read, or could by chance, is of another version."""
    try:
        version = _VERSION.decode(data).version
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError, ValueError):
        return
    if version != VERSION:
        raise MessageError(
            f"C9.3: a message of version {version}; this side speaks {VERSION}: run one release on all stages"
        )


def decode_body(family: Family, data: bytes) -> Message:
    """A body of exactly this family, without an envelope (C9.1).  Raises :class:`~kvbaton.errors.MessageError`."""
    try:
        return _BODY[family].decode(data)  # type: ignore[no-any-return]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError, ValueError) as error:
        raise MessageError(f"C9.3: not a message of the {family} family: {error}") from error
