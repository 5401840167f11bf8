"""A page of counters, between its owner and whoever reads it: here, and in another process."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvbaton.errors import TransportError
from kvbaton_cuda_ipc import counters
from kvbaton_cuda_ipc.counters import MAX_LANES, Page, Reader, Where


@pytest.fixture
def page():
    page = Page()
    yield page
    page.close()


def descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.clause("T3")
def test_what_is_written_is_read_each_lane_by_itself(page):
    reader = Reader(page.where)
    assert [reader.value(lane) for lane in range(MAX_LANES)] == [0] * MAX_LANES
    for lane in range(MAX_LANES):
        page.write(lane, (1 << 62) + lane)
    assert [reader.value(lane) for lane in range(MAX_LANES)] == [(1 << 62) + lane for lane in range(MAX_LANES)]
    assert [page.place(lane) % 64 for lane in range(MAX_LANES)] == [0] * MAX_LANES
    assert page.place(MAX_LANES - 1) + 8 <= page.nbytes
    reader.close()
    reader.close()


def test_another_process_reads_it_also_when_its_owner_is_gone():
    """And the page leaves nothing behind: no name, no file."""
    owner = (
        "import sys\nfrom kvbaton_cuda_ipc.counters import Page\npage = Page()\npage.write(1, 77)\n"
        "print(page.where.pid, page.where.fd, page.where.token.hex(), flush=True)\nsys.stdin.readline()"
    )
    with subprocess.Popen([sys.executable, "-c", owner], stdin=-1, stdout=-1, text=True) as process:
        pid, fd, token = process.stdout.readline().split()
        where = Where(int(pid), int(fd), bytes.fromhex(token))
        reader = Reader(where)
        assert reader.value(1) == 77
        process.kill()
        process.wait()
        assert reader.value(1) == 77
        reader.close()
    with pytest.raises(TransportError, match="cannot be opened"):
        Reader(where)


@pytest.mark.clause("T10", "T12")
def test_neither_end_leaves_a_descriptor():
    before = descriptors()
    for _ in range(20):
        page = Page()
        reader = Reader(page.where)
        reader.close()
        page.close()
        page.close()
    assert descriptors() == before


@pytest.mark.clause("C9.3", "T2")
def test_what_is_no_page_is_not_read(page, tmp_path):
    """A number that means another process, or another descriptor, there: nothing is opened that could wait."""
    another = Page()
    before = descriptors()
    read, write = os.pipe()
    file = (tmp_path / "file").open("wb")
    file.truncate(page.nbytes)
    short = os.memfd_create("kvbaton-counters", os.MFD_ALLOW_SEALING)
    fcntl.fcntl(short, counters._ADD_SEALS, counters._SEALS)
    open_ended = os.memfd_create("kvbaton-counters", os.MFD_ALLOW_SEALING)
    os.write(open_ended, page.where.token.ljust(page.nbytes))
    ours = os.getpid()
    wrong = [
        (ours, another.where.fd, "another's page"), (ours, read, "no page"), (ours, short, "no page"),
        (ours, open_ended, "no page"), (ours, file.fileno(), "no page"), (ours, 1 << 20, "cannot be opened"),
        ((1 << 31) - 1, page.where.fd, "cannot be opened"),
    ]  # fmt: skip
    for pid, fd, why in wrong:
        with pytest.raises(TransportError, match=why):
            Reader(Where(pid, fd, page.where.token))
    for fd in (read, write, short, open_ended):
        os.close(fd)
    file.close()
    assert descriptors() == before
    another.close()


@pytest.mark.clause("C9.3")
def test_a_reader_cannot_write_and_nobody_can_take_memory_from_it(page):
    reader = Reader(page.where)
    with pytest.raises((ValueError, TypeError)):
        reader._values[8] = 1
    with pytest.raises(PermissionError):
        os.ftruncate(page.where.fd, 0)
    reader.close()


@pytest.mark.clause("T2", "T10")
def test_a_file_that_is_no_page_is_not_opened(page, tmp_path):
    """Whose peer counts its processes apart may look at a file of its own: to close it would end its locks there."""
    file = (tmp_path / "database").open("wb")
    fcntl.lockf(file, fcntl.LOCK_EX)
    with pytest.raises(TransportError, match="no page"):
        Reader(Where(os.getpid(), file.fileno(), page.where.token))
    other = f"import fcntl\nfcntl.lockf(open({file.name!r}, 'wb'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    tried = subprocess.run([sys.executable, "-c", other], capture_output=True, text=True)
    assert "BlockingIOError" in tried.stderr, "the lock is gone"
    file.close()


@pytest.mark.clause("T13")
def test_a_python_that_was_built_for_an_old_c_library_has_counters_too():
    """It names neither the call nor its flags; uv's and conda's do not."""
    program = """
import fcntl, os
for module, begins in ((os, ("memfd_create", "MFD_")), (fcntl, ("F_SEAL", "F_ADD_SEALS", "F_GET_SEALS"))):
    for name in [name for name in dir(module) if name.startswith(begins)]:
        delattr(module, name)
from kvbaton_cuda_ipc.counters import Page, Reader
page = Page()
page.write(1, 77)
print(Reader(page.where).value(1), os.get_inheritable(page.where.fd))
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.stdout == "77 False\n", ran.stderr


@pytest.mark.clause("T13")
def test_a_c_library_that_has_no_such_memory_is_told(monkeypatch):
    monkeypatch.setattr(counters.ctypes, "CDLL", lambda *_, **__: object())
    with pytest.raises(OSError, match="no memfd_create"):
        Page()


@pytest.mark.clause("T10", "T7")
def test_where_no_descriptors_are_left_nothing_else_is_raised_and_nothing_is_left_open():
    program = """
import os, resource
from kvbaton.errors import TransportError
from kvbaton_cuda_ipc.counters import Page, Reader
page, hard = Page(), resource.getrlimit(resource.RLIMIT_NOFILE)[1]
before = sorted(os.listdir("/proc/self/fd"))
for make, refusal in ((Page, OSError), (lambda: Reader(page.where), TransportError)):
    for free in range(4):
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
        held = []
        try:
            while True:
                held.append(os.dup(0))
        except OSError:
            pass
        for fd in held[:free]:
            os.close(fd)
        try:
            make().close()
        except refusal:
            print("refused", end=" ")
        else:
            print("made", end=" ")
        for fd in held[free:]:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        assert sorted(os.listdir("/proc/self/fd")) == before
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.stdout.split() == ["refused", "refused", "made", "made"] * 2, ran.stderr
