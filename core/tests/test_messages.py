"""The wire of the control plane: strict, versioned, three disjoint families (C9.1, C9.3)."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvbaton import messages
from kvbaton.engine import FinishReason, Request, Role, SamplingParams
from kvbaton.errors import LocalProtocolError, MessageError
from kvbaton.identity import PeerId, TransferId
from kvbaton.messages import FAMILIES, VERSION, Envelope, decode, decode_body, encode, envelope, family_of
from kvbaton.reservation import Capacity, Reservation

T = TransferId("0123456789abcdef" * 2)
PEER = PeerId("prefill-0", 7)
REQUEST = Request((1, 2, 3), SamplingParams(max_tokens=5, stop=("x",), stop_token_ids=(2,)))
HELD = Reservation(T, ((0, 1), (2, 3)), 16, 4)

ONE_OF_EACH = [
    messages.Reserve(T, 1, REQUEST, PEER),
    messages.Reserved(HELD),
    messages.Rejected(T, "full", retry=True),
    messages.Prefill(T, 2, REQUEST, HELD, PEER),
    messages.Progress(T, 3),
    messages.Commit(T, 3, segments=10, nbytes=1 << 40, timings={"submitted": 0.25}),
    messages.Received(T, {"received": 0.5}),
    messages.Ack(T),
    messages.Activated(T),
    messages.Output(T, 0, (5, 6), (1, 2)),
    messages.Finished(T, FinishReason.STOP),
    messages.Failed(T, "no", (1, 2), PEER),
    messages.Cancel(T),
    messages.Release(T),
    messages.Retired(T),
    messages.Unproven(T, ((0, 3), (5, 6))),
    messages.Hello(PEER, Role.PREFILL, Capacity(1, 2, 3, 4, 5), b"\x00\xff"),
    messages.Connect(b"endpoint"),
    messages.Connected(PEER),
    messages.PeerDown(PEER, quiet=True, cause="closed"),
    messages.Disconnect(PEER),
    messages.Stop(),
    messages.Fatal("quarantine"),
    messages.Call("c1", "s1", "statistics"),
    messages.Call("c2", "s2", "profile_start", {"directory": "/tmp/p", "seconds": 1.5, "tools": ["python"]}),
    messages.Reply("c1", "s1", {"blocks": 3, "deep": [1, {"a": None}]}),
    messages.Reply("c1", "s1", error="no such method"),
]


def frame(version=VERSION, family="transfer", epoch=1, seq=1, body=None) -> bytes:
    """An envelope put together by hand."""
    return msgspec.msgpack.encode([version, family, epoch, seq, body])


def fields(message) -> dict:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message))


@pytest.mark.clause("C9.1", "C9.3")
def test_one_of_each_is_all_there_are():
    assert {type(m) for m in ONE_OF_EACH} == {kind for kinds in FAMILIES.values() for kind in kinds}


@pytest.mark.clause("C9.3")
@pytest.mark.parametrize("number", range(len(ONE_OF_EACH)))
def test_a_message_survives_the_wire(number):
    sent = envelope(5, 9, ONE_OF_EACH[number])
    assert decode(encode(sent)) == sent
    assert (sent.version, sent.epoch, sent.seq) == (VERSION, 5, 9)


@pytest.mark.clause("C9.1")
@pytest.mark.parametrize("number", range(len(ONE_OF_EACH)))
def test_no_family_accepts_a_message_of_another(number):
    message = ONE_OF_EACH[number]
    own = family_of(message)
    for family in FAMILIES:
        if family == own:
            assert decode_body(family, msgspec.msgpack.encode(message)) == message
            continue
        with pytest.raises(MessageError, match=r"C9\.3"):
            decode_body(family, msgspec.msgpack.encode(message))
        with pytest.raises(MessageError, match=r"C9\.3"):
            decode(frame(family=family, body=fields(message)))
        with pytest.raises(LocalProtocolError, match=r"C9\.1"):
            encode(Envelope(VERSION, family, 1, 1, message))


@pytest.mark.clause("C9.1", "C1.5")
def test_families_share_no_type_and_no_tag():
    tags = [kind.__struct_config__.tag for kinds in FAMILIES.values() for kind in kinds]
    assert len(set(tags)) == len(tags)
    for kind in FAMILIES["control"]:
        assert "transfer" not in kind.__struct_fields__
    for kind in FAMILIES["transfer"]:
        assert not {"control_id", "session_id"} & set(kind.__struct_fields__)


@pytest.mark.clause("C9.3")
@pytest.mark.parametrize("number", range(len(ONE_OF_EACH)))
def test_an_unknown_or_missing_field_is_refused(number):
    message = ONE_OF_EACH[number]
    family = family_of(message)
    good = fields(message)
    with pytest.raises(MessageError):
        decode(frame(family=family, body={**good, "extra": 1}))
    defaults = dict(
        zip(reversed(type(message).__struct_fields__), reversed(type(message).__struct_defaults__), strict=False)
    )
    for name in type(message).__struct_fields__:
        if name not in defaults:
            with pytest.raises(MessageError):
                decode(frame(family=family, body={k: v for k, v in good.items() if k != name}))


@pytest.mark.clause("C9.3")
@pytest.mark.parametrize(
    "body",
    [
        {"type": "Ack", "transfer": 1},
        {"type": "Ack", "transfer": "not an id"},
        {"type": "Ack", "transfer": T.upper()},
        {"type": "Ack", "transfer": T + "\n"},
        {"type": "Commit", "transfer": T, "count": "3"},
        {"type": "Commit", "transfer": T, "count": 3.0},
        {"type": "Commit", "transfer": T, "count": True},
        {"type": "Output", "transfer": T, "position": 0, "token_ids": ["1"]},
        {"type": "Finished", "transfer": T, "reason": "bored"},
        {"type": "Nonsense", "transfer": T},
        {"transfer": T},
        ["Ack", T],
        None,
        {**fields(ONE_OF_EACH[0]), "ordinal": 0},
        {**fields(ONE_OF_EACH[0]), "source": {"name": "prefill-0", "epoch": 1, "pid": 3}},
        {**fields(ONE_OF_EACH[0]), "request": {**fields(REQUEST), "prompt": []}},
        {**fields(ONE_OF_EACH[0]), "request": {**fields(REQUEST), "cheap": True}},
    ],
    ids=str,
)
def test_a_wrong_type_or_value_is_refused(body):
    with pytest.raises(MessageError, match=r"C9\.3"):
        decode(frame(body=body))


@pytest.mark.clause("C9.3")
def test_another_version_is_refused_with_both_in_the_text():
    with pytest.raises(MessageError, match=f"version {VERSION + 1}; this side speaks {VERSION}"):
        decode(frame(version=VERSION + 1, body=fields(messages.Ack(T))))


@pytest.mark.clause("C9.3")
def test_an_oversized_message_is_refused_before_it_is_read():
    data = encode(envelope(1, 1, messages.Fatal("x" * 1000)))
    assert decode(data, max_bytes=len(data)).body == messages.Fatal("x" * 1000)
    with pytest.raises(MessageError, match=r"control\.max_message"):
        decode(data, max_bytes=len(data) - 1)


@pytest.mark.clause("C9.3")
def test_a_hostile_nesting_is_refused():
    deep = b"\x91" * 100_000 + b"\xc0"
    with pytest.raises(MessageError):
        decode(deep)
    reply = msgspec.msgpack.encode(fields(messages.Reply("c", "s")))[:-1]
    assert reply
    body = b"\x84" + b"".join(
        msgspec.msgpack.encode(v) for v in ("type", "Reply", "control_id", "c", "session_id", "s", "result")
    )
    with pytest.raises(MessageError):
        decode(b"\x95" + b"".join(msgspec.msgpack.encode(v) for v in (VERSION, "control", 1, 1)) + body + deep)


@pytest.mark.clause("C9.3")
def test_a_value_that_cannot_travel_is_the_callers_error():
    with pytest.raises(LocalProtocolError, match="cannot travel"):
        encode(envelope(1, 1, messages.Reply("c", "s", {"x": object()})))
    with pytest.raises(LocalProtocolError, match="cannot travel"):
        encode(envelope(1, 1, messages.Commit(T, 1 << 80)))


@pytest.mark.clause("C7.2")
def test_a_count_that_is_not_positive_reaches_the_machine_that_must_name_it():
    assert decode(encode(envelope(1, 1, messages.Commit(T, 0)))).body == messages.Commit(T, 0)


@pytest.mark.clause("C9.3")
@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=200))
@example(b"")
@example(b"\xdd\xff\xff\xff\xff")
@example(b"\x95\x01\xa8transfer\x01\x01\xdf\xff\xff\xff\xff")
def test_rubbish_is_refused_and_nothing_else_is_raised(data):
    with pytest.raises(MessageError):
        decode(data)


@pytest.mark.clause("C9.3")
@settings(max_examples=500, deadline=None)
@given(st.data())
def test_a_damaged_message_is_refused_or_is_still_a_message(data):
    whole = bytearray(encode(envelope(1, 1, data.draw(st.sampled_from(ONE_OF_EACH)))))
    for _ in range(data.draw(st.integers(1, 4))):
        if not whole:
            break
        at = data.draw(st.integers(0, len(whole) - 1))
        match data.draw(st.sampled_from(("flip", "cut", "insert"))):
            case "flip":
                whole[at] = data.draw(st.integers(0, 255))
            case "cut":
                del whole[at : at + data.draw(st.integers(1, 8))]
            case _:
                whole[at:at] = data.draw(st.binary(min_size=1, max_size=8))
    try:
        found = decode(bytes(whole))
    except MessageError:
        return
    assert type(found.body) in FAMILIES[found.family]
    assert decode(encode(found)) == found or found != found  # a damaged number may have become NaN


@pytest.mark.clause("C9.3")
def test_importing_the_wire_loads_no_framework_and_no_transport():
    code = (
        "import sys, kvbaton.messages as m; loaded = {n.split('.')[0] for n in sys.modules};"
        "print(sorted(loaded & {'torch', 'zmq', 'pydantic', 'pluggy', 'stevedore', 'nixl'}))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert out.stdout.strip() == "[]"
