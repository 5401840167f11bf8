"""A page of counters, between its owner and whoever reads it: here, and in another process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvbaton.errors import TransportError
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
    short = os.memfd_create("short", os.MFD_ALLOW_SEALING)
    ours = os.getpid()
    wrong = [
        (ours, another.where.fd, "another's page"), (ours, read, "no page"), (ours, short, "no page"),
        (ours, file.fileno(), "cannot be read"), (ours, 1 << 20, "cannot be opened"),
        ((1 << 31) - 1, page.where.fd, "cannot be opened"),
    ]  # fmt: skip
    for pid, fd, why in wrong:
        with pytest.raises(TransportError, match=why):
            Reader(Where(pid, fd, page.where.token))
    for fd in (read, write, short):
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
