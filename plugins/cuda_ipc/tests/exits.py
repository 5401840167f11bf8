"""Processes that end with a CUDA IPC connector in them, in every way: status 0 and not a word, closed or not.

python plugins/cuda_ipc/tests/exits.py --count 50            # of each, over all cases, on a CUDA device
python plugins/cuda_ipc/tests/exits.py --count 3 --no-device # on a device that is none
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
sys.path.insert(0, str(HERE.parent))

#: How a process ends: with its peer in another process alive, or dead; by ``sys.exit``, or by an exception in its main
#: program; with a copy under way (not closed, then: that is refused, T10).
CASES = ("live-peer", "dead-peer", "sys-exit", "exception", "busy")
CLOSES = ("close", "no-close")
BOUND = 60.0
#: Bytes of the copy that is under way, on a device and on none.
LARGE, SMALL = 256 << 20, 1 << 20


def possible(case, closes):
    return (case, closes) != ("busy", "close")


def end_of(case, closes, device=True):
    """Run one process; what was wrong with its end, in words, or nothing."""
    started = time.monotonic()
    words = ["--case", case, "--closes", closes, *([] if device else ["--no-device"])]
    try:
        done = subprocess.run(
            [sys.executable, "-P", str(HERE), *words], capture_output=True, timeout=BOUND, check=False,
            stdin=subprocess.DEVNULL,
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


# -- what such a process does ------------------------------------------------------------------------------------------


def live(case, closes, device):
    """Two ends and a chunk across; the second end is in a child process."""
    from kvbaton.connector import Chunk
    from kvbaton.identity import PeerId, new_transfer_id
    from kvbaton_conformance.harness import Pair, close_ends, open_end, segments
    from kvbaton_conformance.subject import Reference, resolve
    from kvbaton_conformance.two_process import PeerProcess, Processes, open_remote_end

    if device:
        from kvbaton_cuda_ipc import cuda_ipc as plugin

        name, memory = "kvbaton_cuda_ipc:cuda_ipc", "cuda"
    else:
        from fake_plugin import plugin

        name, memory = "fake_plugin:plugin", "host"
    size = 1 << 16
    if case == "busy":
        size = LARGE if device else SMALL
    options = {"programs": 1} if case == "busy" else {}
    near = open_end(plugin, plugin.Options(**options), PeerId.start("prefill-0"), regions={0: size}, memory_kind=memory)
    processes = Processes()
    subject = resolve(plugin, {}, Reference(name), name, memory)
    far = open_remote_end(processes, subject, PeerId.start("decode-0"), {"regions": {0: size}}, {})
    assert isinstance(far.process, PeerProcess)
    pair = Pair(near, far)
    pair.connect()

    def post(nbytes):
        rows = segments((0, 0, nbytes))
        chunk = Chunk(new_transfer_id(), 0, far.peer, rows, rows, nbytes)
        assert near.guard.submit(chunk)

    post(4096)
    pair.pump_until(lambda: near.completions and far.receipts, "T5: a chunk arrives")
    if case == "busy":
        for _ in range(8):
            post(size)
    if case == "dead-peer":
        far.kill()
    print("ready", flush=True)
    if closes == "close":
        close_ends([near])
    if case != "dead-peer":
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


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=CASES)
    parser.add_argument("--closes", choices=CLOSES)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--no-device", dest="device", action="store_false")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    asked = parser.parse_args()
    if asked.case:
        return live(asked.case, asked.closes, asked.device)  # kept alive until the interpreter ends
    started = time.monotonic()
    ways = []
    for closes in CLOSES:
        able = itertools.cycle(case for case in CASES if possible(case, closes))
        ways += [(case, closes) for case in itertools.islice(able, asked.count)]
    wrong = 0
    with ThreadPoolExecutor(asked.jobs) as pool:
        for number, problem in enumerate(pool.map(lambda way: end_of(*way, asked.device), ways), 1):
            if problem:
                wrong += 1
                print(problem, flush=True)
            if number % 20 == 0:
                print(f"{number} exits, {wrong} wrong so far, {time.monotonic() - started:.0f} s", flush=True)
    print(f"{2 * asked.count} exits, {wrong} wrong, {time.monotonic() - started:.0f} s")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    kept = main()
