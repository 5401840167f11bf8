"""Values as bytes that tell of damage."""

from __future__ import annotations

import msgspec
import pytest

from kvbaton.errors import ProtocolViolation
from kvbaton.sealed import checksum, seal, unseal


class Word(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    name: str
    number: int


WORD = Word("a", 1)


def test_what_was_sealed_comes_back():
    assert unseal(seal(WORD), Word, 64) == WORD


@pytest.mark.clause("C9.3")
def test_one_bit_anywhere_is_noticed():
    sealed = seal(WORD)
    for bit in range(8 * len(sealed)):
        damaged = bytearray(sealed)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ProtocolViolation, match="damaged"):
            unseal(bytes(damaged), Word, 64)


@pytest.mark.clause("C9.3")
@pytest.mark.parametrize("body", [b"", b"\xc0", msgspec.msgpack.encode(["a"]), b"\x91" * 5000, b"\xdd\xff\xff\xff\xff"])
def test_a_right_checksum_makes_no_word_of_other_bytes(body):
    with pytest.raises(ProtocolViolation, match="no Word"):
        unseal(body + checksum(body), Word, 1 << 16)


@pytest.mark.clause("C9.3")
def test_more_than_is_accepted_is_not_even_looked_at():
    with pytest.raises(ProtocolViolation, match="at most 4 are accepted"):
        unseal(seal(WORD), Word, 4)
