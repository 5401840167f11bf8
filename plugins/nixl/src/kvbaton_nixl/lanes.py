"""Which ways UCX has chosen between two processes of this host, found out by moving bytes between two of them.

UCX tells nobody who asks; it prints its choices when it makes them, where ``UCX_PROTO_INFO`` is set.  So two children
are started, each with an agent as a connector's would be: a *target* that waits, and a *source* that writes to it and
whose tables are read.  A transport that silently fell back to a slow way shows here.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from kvbaton.connector import Lane, MemoryKind
from kvbaton.errors import TransportError
from kvbaton_nixl.options import NixlOptions

#: Seconds that the whole look may take.
BOUND = 60.0
#: Bytes of the writes: of a note, of a short segment, of a part.
SIZES = (8, 64 << 10, 4 << 20)

# UCX names memory as "host memory", and as "cuda/GPU0" or "cuda/dev[1]" where it knows the device
_WRITE = re.compile(r"remote memory write by \w+\*?(?:\((\S+)\))? from (\w+)\S*(?: memory)? to (\w+)")
_NOTE = re.compile(r"active message by \w+\*? from (\w+)\S*(?: memory)?$")
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_BYTES = re.compile(r"(\d+)([KMGT]?)B?")


# -- reading the tables ------------------------------------------------------------------------------------------------


def read(text: str) -> list[Lane]:
    """The lanes that UCX's tables name for writes, and for the notes behind them, to another process.

    Its own order; each once.  What is no table is passed over.  NIXL posts every write as one of several: where UCX has
    said how it sends those, that is what happens, and how it would send one alone is not.
    """
    found: dict[Lane, None] = {}
    several: set[Lane] = set()
    for title, rows in _tables(text.splitlines()):
        endpoint, _, operation = title.partition("\n")
        if " self " in endpoint:
            continue  # an agent to itself: nothing of ours goes there
        write, note = _WRITE.search(operation), _NOTE.search(operation)
        how = write[1] or "" if write is not None else ""
        if write is not None and (not how or "multi" in how):
            what, source, target = "write", write[2], write[3]
        elif note is not None:
            what, source, target = "note", note[1], "host"
        else:
            continue
        lanes = [Lane(what, source, target, *_extent(extent), lane, method) for extent, method, lane in rows]
        found.update(dict.fromkeys(lanes))
        several.update(lanes if how else ())
    known = {(lane.source, lane.target) for lane in several}
    return [
        lane for lane in found
        if lane.operation != "write" or lane in several or (lane.source, lane.target) not in known
    ]  # fmt: skip


def taken(text: str, kind: MemoryKind) -> list[Lane]:
    """Of what :func:`read` finds that by which anything of ours goes: writes from such memory to such, and notes.

    UCX also says how it would write between memories of two kinds, which a connector never does.  Raises
    :class:`~kvbaton.errors.TransportError` where it is not said how writes of ours go: others' prove nothing.
    """
    lanes = [lane for lane in read(text) if lane.operation != "write" or (lane.source, lane.target) == (kind, kind)]
    if not any(lane.operation == "write" for lane in lanes):
        raise TransportError(f"bytes were written, but UCX did not say by which way from {kind} to {kind} memory")
    return sorted(lanes, key=lambda lane: lane.operation != "write")  # what moves bytes first


def _tables(lines: Iterable[str]) -> Iterator[tuple[str, list[list[str]]]]:
    """Each table as its title's lines and its rows of three cells, without the line that names the columns."""
    title: list[str] = []
    rows: list[list[str]] = []
    for line in lines:
        start = re.search(r"[|+]", line.partition("] [")[2].partition("]")[2] or line)
        if start is None:
            continue
        drawn = start.string[start.start() :].strip()
        if drawn.startswith("+-"):
            continue
        cells = [cell.strip() for cell in drawn.strip("|").split("|")]
        if len(cells) == 1:
            if rows:
                yield "\n".join(title), rows[1:]
                title, rows = [], []
            title.append(cells[0])
        elif len(cells) == 3:
            rows.append(cells)
    if rows:
        yield "\n".join(title), rows[1:]


def _extent(text: str) -> tuple[int, int | None]:
    """``16516..inf``, ``0..8K`` or ``0``."""
    first, dots, last = text.partition("..")
    return _bytes(first), (_bytes(first) if not dots else None if last == "inf" else _bytes(last))


def _bytes(text: str) -> int:
    match = _BYTES.fullmatch(text)
    if match is None:
        raise TransportError(f"UCX writes a size as {text!r}, which this version of kvbaton-nixl cannot read")
    return int(match[1]) * _UNITS[match[2]]


# -- the two processes -------------------------------------------------------------------------------------------------


def look(options: NixlOptions, kind: MemoryKind = "host", device: int = 0) -> list[Lane]:
    """Start both, let one write to the other, and read what UCX said.  Takes seconds; leaves nothing behind.

    Raises :class:`~kvbaton.errors.TransportError` where nothing could be written, with what was said instead.
    """
    until = time.monotonic() + BOUND
    order = {"options": options.model_dump(mode="json"), "kind": kind, "device": device}
    with contextlib.ExitStack() as stack:
        target = stack.enter_context(_child("target", stderr=subprocess.PIPE))
        source = stack.enter_context(_child("source", stderr=subprocess.STDOUT, UCX_PROTO_INFO="y"))
        where = _asked(target, order, until)
        try:
            said, _ = source.communicate(json.dumps({**order, **where}) + "\n", max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise TransportError(f"nothing was written from one process to another within {BOUND:g} s") from None
    if source.returncode:
        raise TransportError(f"no lane: one process could not write to another: {_last(said)}")
    return taken(said, kind)


@contextlib.contextmanager
def _child(role: str, stderr: int, **environment: str) -> Iterator[subprocess.Popen[str]]:
    inherited = {key: value for key, value in os.environ.items() if key not in ("UCX_PROTO_INFO", "UCX_LOG_FILE")}
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", "kvbaton_nixl.lanes", role],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True, errors="replace",
        env={**inherited, **environment},
    )  # fmt: skip
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def _asked(target: subprocess.Popen[str], order: dict[str, Any], until: float) -> dict[str, Any]:
    """Where the target may be written."""
    assert target.stdin is not None
    assert target.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        target.stdin.write(json.dumps(order) + "\n")
        target.stdin.flush()
    ready, _, _ = select.select([target.stdout], [], [], max(0.0, until - time.monotonic()))
    line = target.stdout.readline() if ready else ""
    if not line.startswith("{"):
        target.kill()
        raise TransportError(f"no lane: a process could not make its end ready: {_last(target.communicate()[1])}")
    where: dict[str, Any] = json.loads(line)
    return where


def _last(said: str) -> str:
    """The last line of what a process said, which is its error."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


def _end(role: str) -> None:
    """What a child does."""
    from kvbaton_nixl import library
    from kvbaton_nixl.descriptors import SPACES
    from kvbaton_nixl.link import destroy, let_go

    order = json.loads(sys.stdin.readline())
    kind: MemoryKind = order["kind"]
    device, nbytes = int(order["device"]), max(SIZES)
    memory, address = _memory(kind, device, nbytes)
    agent = library.make_agent(f"lanes-{role}-{os.getpid()}", NixlOptions(**order["options"]))
    agent.register_memory([(address, nbytes, device, "")], SPACES[kind], backends=list(agent.backends))
    if role == "target":
        print(json.dumps({"agent": agent.get_agent_metadata().hex(), "address": address}), flush=True)
        while not select.select([sys.stdin], [], [], 0.0005)[0]:  # until whoever asked has gone
            agent.get_new_notifs()
    else:
        name = agent.add_remote_agent(bytes.fromhex(order["agent"]))
        for size in SIZES:
            source, target = (
                agent.get_xfer_descs(np.array([(at, size, device)], np.uint64), SPACES[kind])
                for at in (address, order["address"])
            )
            handle = agent.initialize_xfer("WRITE", source, target, name, b"lane")
            agent.transfer(handle)
            until = time.monotonic() + BOUND / 2
            while agent.check_xfer_state(handle) != "DONE":
                if time.monotonic() > until:
                    raise TransportError(f"a write of {size} bytes was not done within {BOUND / 2:g} s")
                time.sleep(0.0002)
            let_go(handle)
    destroy(agent)
    del memory


def _memory(kind: MemoryKind, device: int, nbytes: int) -> tuple[Any, int]:
    """Memory of a kind, which lives as long as what is returned first, and its address."""
    if kind == "host":
        array = np.zeros(nbytes, np.uint8)
        return array, array.ctypes.data
    import torch

    tensor = torch.zeros(nbytes, dtype=torch.uint8, device=torch.device("cuda", device))
    torch.cuda.synchronize(device)
    return tensor, tensor.data_ptr()


if __name__ == "__main__":
    try:
        _end(sys.argv[1])
    except Exception as reason:
        sys.exit(f"{type(reason).__name__}: {reason}")
