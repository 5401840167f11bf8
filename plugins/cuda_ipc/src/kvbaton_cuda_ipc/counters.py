"""Counters that a device raises and another process reads: how far a source's launches have come.

A source has a *page* of the host's memory, with one counter for each of its lanes.  Behind every launch the device
itself writes the launch's number there, in the order of the lane.  Whoever was told that a chunk went with launch *n*
of a lane, and reads *n* or more, knows that it has ended, without a word of the source's: its thread may be held up by
whatever else runs in its interpreter.

**Order** (T3).  A stream's write comes after everything before it in that stream, kernels and copies of the engine, and
behind a fence for the whole stream that is what ``__threadfence_system`` is for a thread: for the host and for peer
devices, too.  (That is the default of ``cuStreamWriteValue64``, and since CUDA 11.7 there is nothing else.)  So whoever
sees the number sees the bytes.  A launch that fails ends its context, and nothing behind it is carried out; so a number
is never ahead of its bytes, and one that does not come proves nothing.  The event of a launch is recorded behind its
number: whoever is told by who has seen that, as by a *bye*, finds the number there.

The reader's load is a plain one, and needs no more on processors that order weakly: the bytes are in a device's memory,
which the host reads and launches on by asking the device, and to ask is to store, which no processor does ahead of the
branch that it depends on.  Nothing is read out of the page beside the number.

**Sharing.**  The page belongs to no file that could be left behind: it is opened through the owner's descriptor
(``/proc/PID/fd/N``), for reading only, by a process of the same user that sees the owner under the same number; a
token in the page says that it is this one.  Its size is sealed, so that no reader can be made to fault.  Where any of
that is not so, or the device does not do it, there are no counters, and words say what has come.

Threading: a reader may be another process at any time; everything else is of the connector's thread.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Protocol

import msgspec
import numpy as np

from kvbaton.errors import TransportError
from kvbaton_cuda_ipc.driver import DriverError

#: Bytes of a page, of the token at its beginning, and of the line of memory that a counter has for itself.
_PAGE, _TOKEN, _LINE = 4096, 16, 64
#: Counters that a page has room for.
MAX_LANES = _PAGE // _LINE - 1
#: Pages that a device may write yet, for as long as this process lives: their memory must not be somebody else's.
_NEVER_AGAIN: list[Page] = []
#: A page's name, and how ``/proc`` shows it.
_NAME = "kvbaton-counters"
_SHOWN = f"/memfd:{_NAME}"
# Linux's own numbers.  A Python that was built for an old C library, uv's and conda's are, has no names for them
_CLOEXEC, _ALLOW_SEALING = 1, 2
_ADD_SEALS, _GET_SEALS = 1033, 1034
_SEALS = 1 | 2 | 4  # F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW


class Where(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A page as another process finds it: descriptor ``fd`` of process ``pid``, with the token that it begins with."""

    pid: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
    fd: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
    token: Annotated[bytes, msgspec.Meta(min_length=_TOKEN, max_length=_TOKEN)]


def _values(page: mmap.mmap) -> memoryview[int]:
    """The counters of a page, one for each lane that it has room for; to be released before the page is closed."""
    return memoryview(page).cast("Q")[_LINE // 8 :: _LINE // 8]


def _memory() -> int:
    """A descriptor of new memory that belongs to no file.  For the same reason asked of the C library itself."""
    create = getattr(ctypes.CDLL(None, use_errno=True), "memfd_create", None)
    if create is None:
        raise OSError(errno.ENOSYS, "the C library has no memfd_create")
    fd = int(create(_NAME.encode(), ctypes.c_uint(_CLOEXEC | _ALLOW_SEALING)))
    if fd < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return fd


class Page:
    """A page of our own.  Raises :class:`OSError` where there can be none."""

    def __init__(self) -> None:
        self._fd = _memory()
        try:
            os.ftruncate(self._fd, _PAGE)
            fcntl.fcntl(self._fd, _ADD_SEALS, _SEALS)
            self._map = mmap.mmap(self._fd, _PAGE)
        except BaseException:
            os.close(self._fd)
            raise
        token = secrets.token_bytes(_TOKEN)
        self._map[:_TOKEN] = token
        self.where = Where(os.getpid(), self._fd, token)
        self._values = _values(self._map)

    @property
    def address(self) -> int:
        """Where it begins in this process."""
        return int(np.frombuffer(self._map, np.uint8).ctypes.data)

    nbytes = _PAGE

    @staticmethod
    def place(lane: int) -> int:
        """Of a lane's counter, in bytes from the beginning."""
        return (lane + 1) * _LINE

    def value(self, lane: int) -> int:
        return self._values[lane]

    def write(self, lane: int, value: int) -> None:
        """What a device does, where there is none."""
        self._values[lane] = value

    def close(self) -> None:
        """Idempotent.  No device may write it any more; whoever reads it keeps it."""
        if self._fd >= 0:
            self._values.release()
            self._map.close()
            os.close(self._fd)
            self._fd = -1


class Reader:
    """A peer's page.  Raises :class:`~kvbaton.errors.TransportError` where it cannot be opened, or is another."""

    def __init__(self, where: Where) -> None:
        path = Path(f"/proc/{where.pid}/fd/{where.fd}")
        try:
            # to open what it is not could wait, or do something; to close it would end the locks we have on it (POSIX)
            if not str(path.readlink()).startswith(_SHOWN):
                raise TransportError(f"{path} is no page of counters: the peer counts its processes apart from ours")
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise TransportError(f"a peer's counters cannot be opened: {error}") from error
        try:
            if fcntl.fcntl(fd, _GET_SEALS) & _SEALS != _SEALS or os.fstat(fd).st_size != _PAGE:
                raise TransportError(f"{path} is no page of counters: the peer counts its processes apart from ours")
            self._map = mmap.mmap(fd, _PAGE, prot=mmap.PROT_READ)
        except OSError as error:
            raise TransportError(f"a peer's counters cannot be read: {error}") from error
        finally:
            os.close(fd)
        self._values = _values(self._map)
        if self._map[:_TOKEN] != where.token:
            self.close()
            raise TransportError(f"{path} is another's page of counters: the peer counts its processes apart from ours")

    def value(self, lane: int) -> int:
        """The number of the lane's last launch that is over.  One load of eight aligned bytes, never half of it."""
        return self._values[lane]

    def close(self) -> None:
        """Idempotent."""
        self._values.release()
        self._map.close()


class WritesHost(Protocol):
    """What is asked of CUDA's driver: see :class:`~kvbaton_cuda_ipc.driver.Driver`."""

    def pin(self, address: int, nbytes: int) -> int: ...

    def unpin(self, address: int) -> None: ...

    def write_behind(self, stream: int, address: int, value: int) -> None: ...


class Counters:
    """Of the lanes of one mover: each launch is counted, and the device writes how far it has come.

    Ownership: the page is ours until :meth:`close`.  Whoever has it open keeps it.
    """

    def __init__(self, cuda: WritesHost, streams: list[int], settle: Callable[[], bool]) -> None:
        """``settle`` waits until nothing is under way in the streams, and says whether that is so.

        Raises :class:`~kvbaton.errors.TransportError` where the device does not write what it should."""
        try:
            self._page = Page()
        except OSError as error:
            raise TransportError(f"there is no memory to share with peers: {error}") from error
        self._cuda, self._streams = cuda, streams
        self._closed = False
        self._numbers = [0] * len(streams)
        try:
            base = cuda.pin(self._page.address, self._page.nbytes)
        except DriverError:
            self._page.close()
            raise
        self._places = [base + self._page.place(lane) for lane in range(len(streams))]
        # proved before anybody relies on it, as the kernel is
        try:
            for lane in range(len(streams)):
                self.raise_behind(lane)
            settle()
            found = self._read()
            if found != self._numbers:
                raise TransportError(f"the device should have written {self._numbers}, and the host reads {found}")
        except BaseException as error:
            self.close(quiet=isinstance(error, Exception) and settle())
            raise

    @property
    def where(self) -> Where:
        return self._page.where

    def raise_behind(self, lane: int) -> int:
        """Let the device raise the lane's counter behind all that is in it; to what.  Raises what the driver says."""
        number = self._numbers[lane] = self._numbers[lane] + 1  # also where it fails: it may have been begun
        self._cuda.write_behind(self._streams[lane], self._places[lane], number)
        return number

    def _read(self) -> list[int]:
        return [self._page.value(lane) for lane in range(len(self._numbers))]

    def close(self, *, quiet: bool) -> None:
        """Idempotent.  ``quiet``: nothing is under way in the streams.  Where that is not known, and the device has not
        written all that it was to write, which it may do yet, or where it has failed, the page stays as long as this
        process."""
        if self._closed:
            return
        self._closed = True
        try:
            if quiet or self._read() == self._numbers:
                self._cuda.unpin(self._page.address)
                self._page.close()
                return
        except DriverError:
            pass
        _NEVER_AGAIN.append(self._page)
