"""Processes that end with an UCX connector in them, in every way: status 0 and not a word, closed or not.

python plugins/cuda_ipc/tests/ucx_exits.py --count 50                   # of each, over all cases; the tests run few
python plugins/cuda_ipc/tests/ucx_exits.py --count 50 --memory cuda     # device memory: a peer in another process
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__)

#: How a process ends: after data has moved; with its peer in another process alive, dead, or stopped with a write under
#: way; by ``sys.exit``, by an exception in its main program; as a spawned child.
CASES = ("data", "live-peer", "dead-peer", "stopped-peer", "sys-exit", "exception", "spawned")
CLOSES = ("close", "no-close")
#: What differs in device memory: a peer in another process.
DEVICE_CASES = ("live-peer", "dead-peer", "sys-exit", "exception")
BOUND = 60.0


def end_of(case, closes, memory="host"):
    """Run one process; what was wrong with its end, in words, or nothing."""
    started = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "-P", str(HERE), "--case", case, "--closes", closes, "--memory", memory],
            capture_output=True, timeout=BOUND, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        return f"{case}, {closes}: still there after {BOUND:g} s: {error.stderr!r}"
    said = done.stderr.decode(errors="replace")
    if case == "exception":
        # Python's own report, and nothing before or behind it
        fine = done.returncode == 1 and said.startswith("Traceback") and said.endswith("RuntimeError: on purpose\n")
    else:
        fine = done.returncode == 0 and not said
    if fine and done.stdout.decode() == "ready\n":
        return ""
    seconds = time.monotonic() - started
    return f"{case}, {closes}: status {done.returncode} after {seconds:.1f} s, stderr {said!r}, stdout {done.stdout!r}"


def possible(case, closes):
    """A connector with a write under way to a process that stands still refuses to be closed (T10)."""
    return (case, closes) != ("stopped-peer", "close")


# -- what such a process does ------------------------------------------------------------------------------------------


def live(case, closes, memory="host"):
    """Two ends and a chunk across; the second end is in a child process where the case is about one."""
    from kvbaton.connector import Chunk
    from kvbaton.identity import PeerId
    from kvbaton_conformance.harness import Pair, close_ends, open_end, segments
    from kvbaton_conformance.subject import Reference, resolve
    from kvbaton_conformance.two_process import PeerProcess, Processes, open_remote_end
    from kvbaton_cuda_ipc import ucx_plugin as plugin

    options = {}
    size = (32 << 20) if case == "stopped-peer" else (1 << 16)
    near = open_end(plugin, plugin.Options(**options), PeerId.start("prefill-0"), regions={0: size}, memory_kind=memory)
    processes = Processes()
    apart = case in ("live-peer", "dead-peer", "stopped-peer") or memory == "cuda"
    if apart:
        subject = resolve("ucx", options, Reference("ucx"), "ucx", memory)
        far = open_remote_end(processes, subject, PeerId.start("decode-0"), {"regions": {0: size}}, options)
        assert isinstance(far.process, PeerProcess)
    else:
        far = open_end(plugin, plugin.Options(), PeerId.start("decode-0"), regions={0: size})
    pair = Pair(near, far)
    pair.connect()

    def post(nbytes, transfer=None):
        rows = segments((0, 0, nbytes))
        chunk = Chunk(transfer or pair.grant(rows), 0, far.peer, rows, rows, nbytes)
        assert near.guard.submit(chunk)

    post(4096)
    pair.pump_until(lambda: near.completions and far.receipts, "T5: a chunk arrives")
    if case == "stopped-peer":
        granted = pair.grant(segments((0, 0, size)))
        far.hang()
        post(size, granted)
        for _ in range(20):
            near.pump()
        assert near.guard.outstanding()
    if case == "dead-peer":
        far.kill()
    print("ready", flush=True)
    if closes == "close":
        close_ends([end for end in (near, far) if end is near or not apart])
    if apart and case != "dead-peer":
        # somebody else's process: it must not outlive the test, and it is not what the test is about
        subprocess.Popen(
            ["/bin/sh", "-c", f"sleep 2; kill -9 {far.process.pid}"], start_new_session=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        ).returncode = 0  # fmt: skip
        far.process._process.returncode = 0
    if case == "exception":
        raise RuntimeError("on purpose")
    if case == "sys-exit":
        sys.exit(0)
    return near, far


def in_a_spawned_process(closes):
    import multiprocessing

    child = multiprocessing.get_context("spawn").Process(target=live, args=("data", closes))
    child.start()
    child.join(BOUND)
    sys.exit(child.exitcode)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=CASES)
    parser.add_argument("--closes", choices=CLOSES)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--memory", choices=("host", "cuda"), default="host")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    asked = parser.parse_args()
    if asked.case == "spawned":
        in_a_spawned_process(asked.closes)
    if asked.case:
        return live(asked.case, asked.closes, asked.memory)  # kept alive until the interpreter ends
    started = time.monotonic()
    ways = []
    for closes in CLOSES:
        cases = CASES if asked.memory == "host" else DEVICE_CASES
        able = itertools.cycle(case for case in cases if possible(case, closes))
        ways += [(case, closes) for case in itertools.islice(able, asked.count)]
    wrong = 0
    with ThreadPoolExecutor(asked.jobs) as pool:
        for number, problem in enumerate(pool.map(lambda way: end_of(*way, asked.memory), ways), 1):
            if problem:
                wrong += 1
                print(problem, flush=True)
            if number % 20 == 0:
                print(f"{number} exits, {wrong} wrong so far", flush=True)
    print(f"{2 * asked.count} exits, {wrong} wrong, {time.monotonic() - started:.0f} s")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    kept = main()
