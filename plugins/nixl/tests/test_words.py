"""What peers say: exact round trips, and anything else is a violation and nothing worse."""

import hashlib

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton.errors import ProtocolViolation
from kvbaton.identity import PeerId, TransferId
from kvbaton_nixl.words import MAX_BODY, MAX_HELLO, Hello, Kind, Lobby, Note, Region

epochs = st.integers(0, (1 << 64) - 1)
kinds = st.sampled_from(list(Kind))
with_body = {Kind.PACKED, Kind.LANDED}
peers = st.builds(PeerId, st.text(max_size=20), epochs)
words = st.integers(0, (1 << 63) - 1)
regions = st.builds(
    Region, st.integers(-(1 << 31), (1 << 31) - 1), st.sampled_from(["host", "cuda"]), st.integers(0, 1 << 31), words,
    st.integers(1, (1 << 63) - 1),
)  # fmt: skip
hellos = st.builds(
    Hello, peers, peers, st.binary(min_size=16, max_size=16), st.binary(min_size=16, max_size=16),
    st.binary(max_size=200), st.lists(regions, max_size=4).map(tuple),
)  # fmt: skip


@st.composite
def notes(draw):
    kind = draw(kinds)
    body = draw(st.binary(min_size=1, max_size=64)) if kind in with_body else b""
    transfer = TransferId(draw(st.binary(min_size=16, max_size=16)).hex())
    return Note(kind, draw(epochs), draw(epochs), transfer, draw(epochs), body)


@pytest.mark.clause("C9.3", "C1.4")
@given(notes())
def test_a_note_comes_back_as_it_was(note):
    assert Note.decode(note.encode()) == note


@pytest.mark.clause("C9.3", "C1.4")
@given(hellos)
def test_a_hello_comes_back_as_it_was(hello):
    assert Hello.decode(hello.encode()) == hello


@pytest.mark.clause("C9.3")
@given(st.binary(max_size=200))
def test_a_lobby_comes_back_as_it_was(agent):
    lobby = Lobby(agent, b"s" * 16)
    assert Lobby.decode(lobby.encode()) == lobby


def decodes(kind, data):
    """The word, or None for a violation; any other exception is the test's failure."""
    try:
        return kind.decode(data)
    except ProtocolViolation:
        return None


@pytest.mark.clause("C9.3")
@settings(max_examples=500)
@given(st.binary(max_size=300), st.sampled_from([Note, Hello, Lobby]))
def test_any_bytes_are_a_word_or_a_violation(data, kind):
    decodes(kind, data)


@pytest.mark.clause("C9.3")
@settings(max_examples=300)
@given(notes(), st.data())
def test_a_note_that_was_changed_is_a_note_or_a_violation(note, data):
    changed = bytearray(note.encode())
    changed[data.draw(st.integers(0, len(changed) - 1))] ^= data.draw(st.integers(1, 255))
    decodes(Note, bytes(changed))
    decodes(Note, bytes(changed[: data.draw(st.integers(0, len(changed)))]))
    assert decodes(Note, note.encode()[:47]) is None


@pytest.mark.clause("C9.3")
@settings(max_examples=300)
@given(hellos, st.data())
def test_a_hello_that_was_changed_is_a_hello_or_a_violation(hello, data):
    changed = bytearray(hello.encode())
    changed[data.draw(st.integers(0, len(changed) - 1))] ^= data.draw(st.integers(1, 255))
    decodes(Hello, bytes(changed))
    decodes(Hello, bytes(changed[: data.draw(st.integers(0, len(changed) - 1))]))


@pytest.mark.clause("C9.3")
@pytest.mark.parametrize(
    "data",
    [
        b"\x91" * 100_000,  # as deep as it is long
        b"\xdd\xff\xff\xff\xff",  # a list of four thousand million
        b"\xdb\xff\xff\xff\xff",
        b"\x97\x82\xa4name\xa2\xff\xfe",  # no UTF-8
        b"",
    ],
    ids=["deep", "long-list", "long-string", "no-utf8", "empty"],
)
@pytest.mark.parametrize("kind", [Note, Hello, Lobby])
def test_bombs_are_violations(data, kind):
    assert decodes(kind, data) is None


@pytest.mark.clause("C9.3")
def test_numbers_out_of_range_are_violations():
    me, you = PeerId("p", 1), PeerId("d", 2)
    for region in [
        [0, "host", -1, 0, 1], [0, "host", 0, -1, 1], [0, "host", 0, 0, 0], [0, "host", 0, 1 << 63, 1],
        [0, "file", 0, 0, 1], [1 << 40, "host", 0, 0, 1], [0, "host", 1 << 40, 0, 1],
    ]:  # fmt: skip
        data = msgspec.msgpack.encode([me, you, b"s" * 16, b"p" * 16, b"agent", [region]])
        assert decodes(Hello, data + hashlib.blake2b(data, digest_size=8).digest()) is None, region


@pytest.mark.clause("C9.3")
def test_one_damaged_byte_is_found():
    """UCX would crash on it."""
    region = Region(0, "host", 0, 4096, 4096)
    for word in (Lobby(b"an agent's address", b"s" * 16), Hello(PeerId("p", 1), PeerId("d", 2), b"s" * 16, b"p" * 16,
                                                             b"an agent's address", (region,))):  # fmt: skip
        data = word.encode()
        assert decodes(type(word), data) == word
        for at in range(len(data)):
            damaged = bytearray(data)
            damaged[at] ^= 0x40
            assert decodes(type(word), bytes(damaged)) is None, at


@pytest.mark.clause("C9.3", "T12")
def test_words_have_a_longest_length():
    note = Note(Kind.PACKED, 1, 2, body=b"x" * MAX_BODY)
    assert decodes(Note, note.encode()) == note
    assert decodes(Note, note.encode() + b"x") is None
    hello = Hello(PeerId("p", 1), PeerId("d", 2), b"s" * 16, b"p" * 16, bytes(MAX_HELLO), ())
    assert decodes(Hello, hello.encode()) is None


@pytest.mark.clause("C9.3")
@pytest.mark.parametrize("kind", list(Kind))
def test_only_packed_words_have_a_body(kind):
    assert (decodes(Note, Note(kind, 1, 2, body=b"x").encode()) is not None) == (kind in with_body)
    assert (decodes(Note, Note(kind, 1, 2).encode()) is not None) == (kind not in with_body)
