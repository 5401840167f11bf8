"""Processes that end with a connector in them, in every way: status 0 and not a word, closed or not (T10).

The suite tries the plain way; here are those in which native libraries go wrong: a peer that is dead, one that stands
still with a write under way, an interpreter that ends by ``sys.exit`` or by an exception, a spawned child.  Each way is
a process of its own, whose exit status, stderr and stdout are looked at.

From the command line, many times over::

    python -m kvbaton_conformance.exits --transport nixl --count 50                  # of each, closed and not
    python -m kvbaton_conformance.exits --transport nixl --count 50 --memory cuda --devices 0,1
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from kvbaton.cli.assignments import assignments
from kvbaton.cli.devices import devices
from kvbaton.connector import Chunk, MemoryKind
from kvbaton.errors import KvbatonError
from kvbaton.identity import PeerId, TransferId
from kvbaton_conformance.harness import End, Pair, close_ends, open_end, segments
from kvbaton_conformance.placement import DEFAULT, PAIR
from kvbaton_conformance.subject import Reference, Subject, SubjectRefused, resolve
from kvbaton_conformance.two_process import Processes, RemoteEnd, open_remote_end

#: How a process ends.  ``data``: after data has moved.  ``live-peer``, ``dead-peer``: its peer is a process that lives,
#: or was killed.  ``stopped-peer``: one that stands still, with a write under way; ``busy``: one that lives, with some.
#: ``sys-exit``, ``exception``: by these, in its main program.  ``spawned``: as a child of :mod:`multiprocessing`.
CASES: Final = ("data", "live-peer", "dead-peer", "stopped-peer", "busy", "sys-exit", "exception", "spawned")
CLOSES: Final = ("close", "no-close")
_UNDER_WAY: Final = ("stopped-peer", "busy")
_APART: Final = ("live-peer", "dead-peer", *_UNDER_WAY)
#: Seconds that such a process may take.
BOUND: Final = 60.0
_SMALL, _CHUNK, _FLIGHTS = 1 << 16, 4096, 8


@dataclass(frozen=True)
class Way:
    """One way for a process to end.

    ``transport``: an entry point or ``module:object``, which the process finds on its own path.  ``nbytes``: of each
    write that is under way.  ``stalls``: it is an error if, with a peer that stands still, nothing stays under way (the
    options then let the peer have a part in the write).
    """

    transport: str
    case: str
    closes: str
    memory: MemoryKind = "host"
    options: Mapping[str, Any] = field(default_factory=dict)
    nbytes: int = 32 << 20
    stalls: bool = False
    #: With ``cuda``: the devices of the two ends, in turn.
    devices: Sequence[int] = DEFAULT

    @property
    def possible(self) -> bool:
        """A connector with a write under way refuses to be closed (T10), so that is no way to end."""
        return self.case not in _UNDER_WAY or self.closes == "no-close"

    def __str__(self) -> str:
        return f"{self.case}, {self.closes}"


def end_of(way: Way, path: Sequence[str] = ()) -> str:
    """Run one process; what was wrong with its end, in words, or nothing.  ``path``: where else it finds modules."""
    started = time.monotonic()
    places = [place for place in (*path, os.environ.get("PYTHONPATH", "")) if place]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "kvbaton_conformance.exits", "--way", json.dumps(asdict(way))],
            capture_output=True, timeout=BOUND, check=False, stdin=subprocess.DEVNULL, env=environment,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        return f"{way}: still there after {BOUND:g} s: {error.stderr!r}"
    said = done.stderr.decode(errors="replace")
    if way.case == "exception":
        # Python's own report, and nothing before or behind it
        fine = done.returncode == 1 and said.startswith("Traceback") and said.endswith("RuntimeError: on purpose\n")
    else:
        fine = done.returncode == 0 and not said
    if fine and done.stdout.decode() == "ready\n":
        return ""
    seconds = time.monotonic() - started
    return f"{way}: status {done.returncode} after {seconds:.1f} s, stderr {said!r}, stdout {done.stdout!r}"


# -- what such a process does ------------------------------------------------------------------------------------------


def _live(way: Way) -> tuple[End, End]:
    """Two ends and a chunk across; what it returns has to be kept until the interpreter ends."""
    subject = resolve(way.transport, way.options, Reference(way.transport), way.transport, way.memory, way.devices)
    apart = way.case in _APART or "in-process" not in subject.modes
    nbytes = way.nbytes if way.case in _UNDER_WAY else _SMALL
    pair = _pair(subject, apart, nbytes)
    near, far = pair.source, pair.target
    _post(pair, _granted(pair, _CHUNK), _CHUNK)
    pair.pump_until(lambda: bool(near.completions and far.receipts), "T5: a chunk arrives")
    if way.case in _UNDER_WAY:
        _leave_under_way(pair, way)
    if way.case == "dead-peer":
        assert isinstance(far, RemoteEnd)
        far.kill()
    print("ready", flush=True)
    if way.closes == "close":
        close_ends([end for end in (near, far) if end is near or not apart])
    if isinstance(far, RemoteEnd) and way.case != "dead-peer":
        _outlive(far)
    if way.case == "exception":
        raise RuntimeError("on purpose")
    if way.case == "sys-exit":
        sys.exit(0)
    return near, far


def _pair(subject: Subject, apart: bool, nbytes: int) -> Pair:
    regions, (here, there) = {0: nbytes}, map(PeerId.start, PAIR)
    near = open_end(subject.plugin, subject.options, here, regions=regions, device=subject.device(here.name))
    far: End
    if apart:
        far = open_remote_end(Processes(), subject, there, {"regions": regions}, subject.given_options)
    else:
        far = open_end(subject.plugin, subject.options, there, regions=regions, device=subject.device(there.name))
    pair = Pair(near, far)
    pair.connect()
    return pair


def _granted(pair: Pair, nbytes: int) -> TransferId:
    return pair.grant(segments((0, 0, nbytes)))


def _post(pair: Pair, transfer: TransferId, nbytes: int) -> None:
    rows = segments((0, 0, nbytes))
    if not pair.source.guard.submit(Chunk(transfer, 0, pair.target.peer, rows, rows, nbytes)):
        raise RuntimeError("the connector takes no chunk")


def _leave_under_way(pair: Pair, way: Way) -> None:
    """Writes of this size, the peer standing still or not; it is granted them before."""
    count = 1 if way.case == "stopped-peer" else _FLIGHTS
    transfers = [_granted(pair, way.nbytes) for _ in range(count)]
    if way.case == "stopped-peer":
        assert isinstance(pair.target, RemoteEnd)
        pair.target.hang()
    for transfer in transfers:
        _post(pair, transfer, way.nbytes)
    if way.case == "stopped-peer":
        for _ in range(20):
            pair.source.pump()
        if way.stalls and not pair.source.guard.outstanding():
            raise RuntimeError("nothing is under way, although the peer stands still")


#: Kill the process ``$0`` in two seconds, if the number is its own still: it began when it did.
_LATER = (
    "began() { sed 's/.*) //' /proc/$0/stat | cut -d' ' -f20; }; it=$(began);"
    ' sleep 2; [ -n "$it" ] && [ "$it" = "$(began)" ] && kill -9 $0'
)


def _outlive(far: RemoteEnd) -> None:
    """The peer is somebody else's process: it lives for longer than this one, and it must not outlive the test."""
    process = far.process.let_go()
    subprocess.Popen(
        ["/bin/sh", "-c", _LATER, str(process)], start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    ).returncode = 0  # not waited for  # fmt: skip


def _in_a_spawned_process(way: Way) -> None:
    child = multiprocessing.get_context("spawn").Process(target=_live, args=(way,))
    child.start()
    child.join(BOUND)
    sys.exit(child.exitcode)


# -- the command -------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> object:
    """The command line.  Status 0: every process ended as it should."""
    parser = argparse.ArgumentParser(
        prog="python -m kvbaton_conformance.exits", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument("--transport", metavar="NAME", help="the connector: an entry point, or module:object")
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="of the transport")
    parser.add_argument("--memory", choices=("host", "cuda"), default="host")
    parser.add_argument("--devices", metavar="I,J", help="CUDA devices of the two ends, with --memory cuda (0)")
    parser.add_argument("--count", type=int, default=50, help="exits closed, and as many not closed (50)")
    parser.add_argument("--case", choices=CASES, action="append", help="these ways only")
    parser.add_argument("--nbytes", type=int, default=Way.nbytes, help="of each write that is under way (32 MiB)")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.way is not None:
        way = Way(**json.loads(given.way))
        if way.case == "spawned":
            _in_a_spawned_process(way)
        return _live(way)
    if given.transport is None:
        parser.error("which one? --transport NAME; `kvbaton plugins` lists them")
    if given.count < 1 or given.jobs < 1 or given.nbytes < _CHUNK:
        parser.error(f"--count and --jobs are at least 1, --nbytes at least {_CHUNK}")
    try:
        options = dict(assignments("--option", given.option))
        chosen = DEFAULT if given.devices is None else devices("--devices", given.devices)
        if given.devices is not None and given.memory != "cuda":
            raise SubjectRefused(f"--devices {given.devices}: it goes with --memory cuda")
        reference = Reference(given.transport)
        subject = resolve(given.transport, options, reference, given.transport, given.memory, chosen, "--memory")
    except (KvbatonError, SubjectRefused) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        sys.exit(2)
    ways: list[Way] = []
    for closes in CLOSES:
        every = [
            Way(given.transport, case, closes, given.memory, options, given.nbytes, devices=chosen)
            for case in given.case or CASES
        ]
        able = [way for way in every if way.possible and reachable(subject, way.case)]
        ways += itertools.islice(itertools.cycle(able), given.count)
    sys.exit(_try_all(ways, given.jobs))


def reachable(subject: Subject, case: str) -> bool:
    """Whether this connector has a peer as this way wants it."""
    return case not in _APART or "two-processes" in subject.modes


def _try_all(ways: Sequence[Way], jobs: int) -> int:
    started, wrong = time.monotonic(), 0
    with ThreadPoolExecutor(jobs) as pool:
        for number, problem in enumerate(pool.map(end_of, ways), 1):
            if problem:
                wrong += 1
                print(problem, flush=True)
            if number % 20 == 0:
                print(f"{number} exits, {wrong} wrong so far", flush=True)
    print(f"{len(ways)} exits, {wrong} wrong, {time.monotonic() - started:.0f} s")
    return 1 if wrong or not ways else 0


if __name__ == "__main__":
    kept = main()  # the ends live until the interpreter ends
