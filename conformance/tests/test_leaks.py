"""What a run of the kit has left behind is told from what others on the machine do meanwhile."""

import abc
import mmap
import os
import subprocess
import sys
import uuid
import weakref
from collections.abc import Mapping
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest

from kvbaton.connector import Need
from kvbaton_conformance import peer_process, shared_memory
from kvbaton_conformance.growth import Growth
from kvbaton_conformance.leaks import holdings, left_behind
from kvbaton_conformance.subject import Reference


def left(before) -> list[str]:
    return [what.removeprefix("shared-memory object ") for what in left_behind(before) if "shared-memory" in what]


@pytest.fixture
def names():
    """Objects that a test makes; gone after it."""
    found = [Path(f"/dev/shm/kvbaton-kit-{uuid.uuid4().hex}") for _ in range(4)]
    yield found
    for path in found:
        path.unlink(missing_ok=True)


def elsewhere(code: str) -> subprocess.Popen[str]:
    """A program that is no child of this process: it says ``ready``, and ends with its standard input."""
    text = f"import os, sys, mmap\n{code}\nprint('ready', flush=True)\nsys.stdin.read()"
    command = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {text!r}])"
    program = subprocess.Popen(
        [sys.executable, "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert program.stdout is not None
    assert program.stdout.readline() == "ready\n"
    assert program.wait(10) == 0
    return program


def end(program: subprocess.Popen[str]) -> None:
    assert program.stdin is not None
    assert program.stdout is not None
    program.stdin.close()
    assert program.stdout.read() == ""
    program.stdout.close()


@pytest.mark.clause("T10")
def test_what_python_made_here_and_nobody_holds_is_found(names):
    before = holdings()
    names[0].write_bytes(b"left")
    memory = SharedMemory(names[1].name, create=True, size=64)
    memory.close()
    names[0].rename(names[2])
    assert left(before) == sorted(map(str, names[1:3]))
    memory.unlink()
    names[2].unlink()
    assert not left(before)


@pytest.mark.clause("T10")
def test_what_was_held_when_it_was_looked_at_is_found(names):
    """As of a native library, which tells Python nothing."""
    before = holdings()
    subprocess.run(["truncate", "-s", "64", names[0]], check=True)
    assert not left(before)
    descriptor = os.open(names[0], os.O_RDWR)
    shared_memory.notice()
    os.close(descriptor)
    assert left(before) == [str(names[0])]


@pytest.mark.clause("T10")
def test_what_others_make_and_hold_is_theirs(names):
    before = holdings()
    program = elsewhere(
        f"f = open({str(names[0])!r}, 'w+b'); f.write(bytes(64)); f.flush(); m = mmap.mmap(f.fileno(), 64)\n"
        f"open({str(names[1])!r}, 'wb').close()"
    )
    assert names[0].exists()
    assert not left(before)
    end(program)
    assert not left(before)


@pytest.mark.clause("T10")
def test_other_programs_are_looked_into_only_where_that_decides(names, monkeypatch):
    """A machine has hundreds, and what is held is asked after every test."""
    asked = []
    monkeypatch.setattr(shared_memory, "_held", lambda pid, held=shared_memory._held: asked.append(pid) or held(pid))
    before = holdings()
    program = elsewhere(f"f = open({str(names[0])!r}, 'wb')")
    assert not left(before)
    ours = shared_memory._tree([os.getpid()])
    assert set(asked) <= ours
    names[1].write_bytes(bytes(8))  # this run's, unless somebody else holds it
    assert left(before) == [str(names[1])]
    assert set(asked) - ours
    end(program)


@pytest.mark.clause("T10")
def test_what_is_handed_to_another_program_is_not_left_here(names):
    """While the other end of a connection still holds it, that one has it to remove."""
    before = holdings()
    names[0].write_bytes(bytes(mmap.PAGESIZE))
    program = elsewhere(f"f = open({str(names[0])!r}, 'r+b'); m = mmap.mmap(f.fileno(), {mmap.PAGESIZE}); f.close()")
    assert not left(before)
    end(program)
    assert left(before) == [str(names[0])]


@pytest.mark.clause("T10")
def test_what_a_process_of_the_run_made_is_found_after_it_was_killed(names):
    before = holdings()
    code = (
        "from kvbaton_conformance import shared_memory\nimport sys\nshared_memory.join()\n"
        f"open({str(names[0])!r}, 'wb').close()\nprint('ready', flush=True)\nsys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.kill()
    assert left(before) == [str(names[0])]


@pytest.mark.clause("T10")
def test_system_v_segments_are_known_by_who_made_them():
    if not Path("/proc/sysvipc/shm").exists():
        pytest.skip("this kernel has no System V shared memory")
    import ctypes

    libc = ctypes.CDLL(None)
    before = holdings()
    id = libc.shmget(0, 4096, 0o600 | 0o1000)
    assert id >= 0
    assert left(before) == [f"System V segment {id}"]
    assert libc.shmctl(id, 0, None) == 0
    assert not left(before)


@pytest.mark.clause("T12")
def test_what_others_make_is_no_growth(names):
    """Watches of both ends at once, on a machine where others have made a thousand objects in the meantime."""
    first = Growth()
    folder = names[0]
    code = "".join(f"open({f'{folder}-{number}'!r}, 'wb').close()\n" for number in range(1000))
    try:
        subprocess.run([sys.executable, "-c", code], check=True)
        second = Growth()
        assert not first.per(200)
        assert not second.per(200)
    finally:
        for path in folder.parent.glob(f"{folder.name}-*"):
            path.unlink()


@pytest.mark.clause("T12")
def test_what_abstract_classes_remember_is_no_growth():
    """They ask, and remember, in whatever happens to run."""

    class Abstract(abc.ABC):  # noqa: B024
        pass

    kinds = [type(f"Kind{number}", (), {}) for number in range(300)]
    before = Growth()
    assert not any(issubclass(kind, Abstract) for kind in kinds)
    assert not before.per(200)
    kept = [weakref.ref(kind, print) for kind in kinds]
    (grown,) = before.per(200)
    assert grown.endswith("objects more of type weakref.ReferenceType")
    assert int(grown.split()[0]) >= len(kept)


@pytest.mark.clause("T12")
def test_what_looking_makes_abstract_classes_remember_is_no_growth():
    kinds = [type(f"Kind{number}", (Mapping,), {}) for number in range(300)]
    Mapping.register(type("Kind", (), {}))  # all that was remembered is forgotten
    before = Growth()
    assert not before.per(200)
    assert len(kinds) == 300


@pytest.mark.clause("T12")
def test_what_is_held_while_another_is_watched_is_no_growth():
    """Watches of both ends at once, in a process with many descriptors, as UCX and CUDA have them."""
    with Path(os.devnull).open() as nothing:
        many = [os.dup(nothing.fileno()) for _ in range(300)]
        try:
            first = Growth()
            second = Growth()
            assert not first.per(200)
            assert not second.per(200)
        finally:
            for descriptor in many:
                os.close(descriptor)


@pytest.mark.clause("T10")
def test_a_forked_process_begins_a_run_of_its_own(names):
    """As the trials of mutants do: what one leaves is not what the next one has left."""
    holdings()
    before = holdings()
    child = os.fork()
    if not child:
        status = 1
        try:
            mine = holdings()
            names[0].write_bytes(b"left")
            status = 0 if left(mine) == [str(names[0])] else 2
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert not left(before)


@pytest.mark.clause("T10")
@pytest.mark.timeout(110)
def test_two_runs_at_once_do_not_disturb_each_other(tmp_path):
    """Over a connector that has named objects, made and removed all the time."""
    (tmp_path / "named.py").write_text(NAMED)
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", str(tmp_path),
        "--pyargs", "kvbaton_conformance.run", "--connector", "named:plugin", "--conformance-level", "connector",
        "-k", "in-process and (any_state or opening)", "--conformance-partial",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    runs = [
        subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                         text=True)
        for _ in range(2)
    ]  # fmt: skip
    try:
        said = [run.communicate(timeout=90)[0] for run in runs]
    finally:
        for run in runs:
            run.kill()
            run.communicate()
    assert [run.returncode for run in runs] == [0, 0], "\n".join(said)


NAMED = """
import atexit, contextlib, os
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from kvbaton_conformance.mutants.reference import ReferenceConnector, ReferencePlugin

class Named(ReferenceConnector):
    def __init__(self, peer):
        super().__init__(peer)
        self.named = SharedMemory(self.name, create=True, size=4096)
        resource_tracker.unregister(self.named._name, "shared_memory")
        atexit.register(self.unlink)

    def unlink(self):
        with contextlib.suppress(FileNotFoundError):
            os.unlink("/dev/shm/" + self.name)

    def let_go(self):
        self.named.close()
        self.unlink()
        super().let_go()

plugin = ReferencePlugin(Named, "named")
"""


@pytest.mark.clause("T10")
@pytest.mark.parametrize("far", [True, False])
def test_what_a_driver_opens_for_the_first_peer_on_another_device_is_there_once(far, monkeypatch):
    """It came after the warm-up, in which there was no such peer; what comes again is left behind by somebody."""
    reference, drivers, thread = (
        "kvbaton_conformance.mutants.reference:plugin",
        "descriptor 41 (/dev/nvidia0)",
        "thread 'x'",
    )
    peer = peer_process.Peer()
    peer.meet(Reference(reference), {}, Need("host", "same_process"), False, None, far)
    found = iter([[], [thread, drivers], [], [drivers]])
    monkeypatch.setattr(peer_process, "left_behind", lambda before: next(found))
    told = [peer.left_behind() for _ in range(4)]
    assert told == [[], [thread] if far else [thread, drivers], [], [drivers]]
