"""From a message to the bytes on a channel and back: size, codec and order (C9.3, C9.4), whatever carries them."""

from __future__ import annotations

from collections import Counter

from kvbaton.control.sequence import InboundSequence, Verdict
from kvbaton.errors import MessageError
from kvbaton.messages import Envelope, Message, decode, encode, envelope


def pack(epoch: int, seq: int, message: Message, max_message: int) -> bytes:
    """The bytes of ``message`` as the sender's number ``seq``.  Raises MessageError where they are more than
    ``max_message``.
    """
    data = encode(envelope(epoch, seq, message))
    if len(data) > max_message:
        raise MessageError(
            f"C9.3: a {type(message).__name__} of {len(data)} bytes is larger than a channel accepts ({max_message});"
            " raise control.max_message. It was not sent."
        )
    return data


def unpack(
    data: bytes, sequence: InboundSequence, max_message: int, dropped: Counter[tuple[str, str]]
) -> tuple[Envelope | None, str | None]:
    """(the envelope if it is the channel's next, the gap if it shows one); what is neither was counted (C9.3)."""
    found = opened(data, max_message, dropped)
    return (None, None) if found is None else judged(found, sequence, dropped)


def opened(data: bytes, max_message: int, dropped: Counter[tuple[str, str]]) -> Envelope | None:
    """The envelope in ``data``; None, and it was counted, where there is none (C9.3)."""
    if len(data) > max_message:
        dropped["unknown", "oversized"] += 1
        return None
    try:
        return decode(data, max_message)
    except MessageError:
        dropped["unknown", "malformed"] += 1
        return None


def judged(
    found: Envelope, sequence: InboundSequence, dropped: Counter[tuple[str, str]]
) -> tuple[Envelope | None, str | None]:
    """(the envelope if it is the channel's next, the gap if it shows one); what is neither was counted (C9.4)."""
    expected = sequence.expected
    verdict = sequence.judge(found.epoch, found.seq)
    if verdict is Verdict.NEXT:
        return found, None
    dropped[found.family, verdict.value] += 1
    return None, f"C9.4: message {found.seq} came where {expected} was due" if verdict is Verdict.GAP else None
