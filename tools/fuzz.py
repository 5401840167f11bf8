"""Coverage-guided fuzzing of what reads a peer's bytes and of the machine that acts on them (C9.3, C7.4).

    python tools/fuzz.py TARGET [--seconds 60] [--corpus FOLDER]

Property-based tests draw what their authors thought of; this keeps whatever reaches a line that nothing reached before,
and goes on from there.  It pays where Python code decides: the decoder of control messages is one call of a compiled
library (a million inputs reach the same four places), so that one is left to ``core/tests/control/test_flood.py``.  A
target fails where its check raises; the bytes that did it are written to a file that ``--replay`` runs again.  Needs
the dependency group ``fuzz`` (atheris, CPython 3.11 to 3.13, x86-64 Linux).

The machine's target plays ``core/tests/handoff/test_hostile_words.py``, each draw of its random numbers taken from the
fuzzer's bytes, so that the schedule itself is what coverage leads.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
#: Moves of one play of the machine: the most that one input may cost.
TURNS = 60


class Drawn(random.Random):
    """Random numbers that are the fuzzer's bytes in order, and noughts after their end."""

    def __init__(self, data: bytes) -> None:
        super().__init__(0)
        self._data = data
        self._at = 0

    @property
    def spent(self) -> bool:
        """All bytes have been used."""
        return self._at >= len(self._data)

    def getrandbits(self, k: int) -> int:
        size = (k + 7) // 8
        part = self._data[self._at : self._at + size]
        self._at += size
        return int.from_bytes(part, "little") & ((1 << k) - 1)

    def random(self) -> float:
        return self.getrandbits(16) / 65536.0


def _beside(path: str) -> ModuleType:
    """A test's module, from its file."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def hello() -> Callable[[bytes], None]:
    """NIXL's first words, with their checksum made right: the struct, or a ProtocolViolation."""
    from kvbaton.errors import ProtocolViolation
    from kvbaton.sealed import checksum
    from kvbaton_nixl import words

    def check(data: bytes) -> None:
        for kind in (words.Hello, words.Lobby):
            try:
                read = kind.decode(data + checksum(data))
            except ProtocolViolation:
                continue
            assert kind.decode(read.encode()) == read
        try:
            note = words.Note.decode(data)
        except ProtocolViolation:
            return
        assert words.Note.decode(note.encode()) == note

    return check


def places() -> Callable[[bytes], None]:
    """Where a packed part's segments lie: no more of them than bytes, or a SegmentError."""
    from kvbaton.errors import SegmentError
    from kvbaton.segments import Segments
    from kvbaton_nixl.descriptors import decode_places, encode_places

    def check(data: bytes) -> None:
        try:
            read = decode_places(data)
        except SegmentError:
            return
        assert 0 <= len(read) <= max(len(data) // 4, 1)
        again = decode_places(encode_places(read) if isinstance(read, Segments) else data)
        assert len(again) == len(read)

    return check


def coordinator() -> Callable[[bytes], None]:
    """The coordinator among stages that lie, die and come back: it never raises, and its books balance."""
    from kvbaton.bounds import FAIL_CLOSED, Recovery

    bedlam = _beside("core/tests/handoff/test_hostile_words.py")

    def check(data: bytes) -> None:
        if len(data) < 8:
            return
        play = bedlam.Bedlam(0, Recovery(recompute=True) if data[0] & 1 else FAIL_CLOSED)
        play.draw = drawn = Drawn(data[1:])
        for _ in range(TURNS):
            if drawn.spent:
                break
            play.turn()
            play.check()
        play.draw = random.Random(1)
        play.end()

    return check


TARGETS: dict[str, tuple[Callable[[], Callable[[bytes], None]], int]] = {
    "hello": (hello, 4096),
    "places": (places, 4096),
    "coordinator": (coordinator, 2048),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("target", choices=sorted(TARGETS))
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--corpus", type=Path, help="where inputs are kept from run to run")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="check this one input, without a fuzzer")
    given = parser.parse_args()
    make, longest = TARGETS[given.target]
    if given.replay is not None:
        make()(given.replay.read_bytes())
        print("holds")
        return 0
    try:
        import atheris
    except ModuleNotFoundError:
        parser.error("atheris is not installed: python -m pip install --group fuzz")
    with atheris.instrument_imports(include=["kvbaton", "kvbaton_nixl"]):
        check = make()
    if given.corpus is not None:
        given.corpus.mkdir(parents=True, exist_ok=True)
    crash = tempfile.gettempdir() + os.sep
    options: list[Any] = [
        sys.argv[0], f"-max_total_time={given.seconds}", f"-max_len={longest}", "-len_control=0", "-timeout=10",
        f"-artifact_prefix={crash}",
        *([str(given.corpus)] if given.corpus is not None else []),
    ]  # fmt: skip
    atheris.Setup(options, check)
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
