"""When a chunk is carried: one connector's queue of submitted chunks, and whoever moves it on.

A :class:`Post` is *queued* until it is *started*; a started one can no longer be cancelled and ends by *finishing*.
The wire knows order, time and faults.  What starting and finishing mean is the connector's affair, and given to the
wire as a :class:`Carriage`.
"""

from __future__ import annotations

import bisect
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvbaton.connector import Chunk
from kvbaton.identity import PeerId
from kvbaton_loopback.options import LoopbackOptions

if TYPE_CHECKING:
    from kvbaton_loopback.connector import Landing

#: A draw that decides nothing must still be made, so that one option's draws do not shift another's.
_DRAWS = 2


@dataclass(slots=True, eq=False)
class Post:
    """One submitted chunk under way."""

    chunk: Chunk
    #: Its place in the queue: the number of the submission, or a little later where the wire reorders.
    rank: float
    #: When it arrives, on the wire's clock.
    due: float
    fails: bool
    stalls: bool
    #: Its receipt will be reported twice.
    echoes: bool
    #: Where it is being written, from start to finish; ``None`` where it was refused.
    landing: Landing | None = None
    error: Exception | None = None


class Carriage(Protocol):
    """What the wire does with a post.  ``start`` and ``finish`` are called under the lock, ``copy`` without it."""

    def start(self, post: Post) -> None: ...

    def copy(self, post: Post) -> None: ...

    def finish(self, post: Post) -> None: ...


class Wire:
    """A queue that is emptied one post at a time, by its own thread or by a test's calls of :meth:`step`.

    Methods that a connector calls (``put``, ``take``, ``stop``) expect ``lock`` to be held; what a test or the thread
    calls (``start``, ``finish``, ``step``, ``hold``, ``resume``) takes it.
    """

    def __init__(
        self,
        name: str,
        options: LoopbackOptions,
        lock: threading.Lock,
        carriage: Carriage,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._options = options
        self._lock = lock
        self._bell = threading.Condition(lock)
        self._carriage = carriage
        self._clock = clock
        self._random = random.Random(options.seed)
        self._submissions = 0
        self._free = 0.0  # when the line has carried everything before
        self._queue: list[Post] = []  # by rank
        self._stalled: list[Post] = []
        self._held: set[PeerId] = set()
        self._started: Post | None = None
        self._thread: threading.Thread | None = None
        self._stopped = False

    # -- the connector's side ----------------------------------------------------------------------------------------

    def put(self, chunk: Chunk) -> None:
        """Queue a chunk."""
        number, options = self._submissions, self._options
        self._submissions += 1
        delay, echo = (self._random.random() for _ in range(_DRAWS))
        due = 0.0
        if options.bandwidth or options.latency:
            busy = chunk.nbytes / options.bandwidth if options.bandwidth else 0.0
            self._free = max(self._free, self._clock()) + busy
            due = self._free + options.latency
        post = Post(
            chunk, number + delay * options.reorder, due, number in options.fail_chunks, number in options.stall_chunks,
            echo < options.duplicate_receipts,
        )  # fmt: skip
        bisect.insort(self._queue, post, key=lambda queued: queued.rank)
        if options.carrier == "thread" and self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"loopback-wire {self._name}", daemon=True)
            self._thread.start()
        self._bell.notify()

    def take(self, wanted: Callable[[Post], bool]) -> list[Post]:
        """Remove the queued posts that are wanted, and hand them over."""
        taken = [post for post in self._queue if wanted(post)]
        self._queue = [post for post in self._queue if not wanted(post)]
        return taken

    def take_stalled(self, wanted: Callable[[Post], bool]) -> list[Post]:
        """The same for stalled posts: only who knows that the peer is dead may."""
        taken = [post for post in self._stalled if wanted(post)]
        self._stalled = [post for post in self._stalled if not wanted(post)]
        return taken

    def stop(self) -> threading.Thread | None:
        """Carry no more.  The thread returned, if any, is to be joined without the lock."""
        self._stopped = True
        self._queue.clear()
        self._stalled.clear()
        self._bell.notify()
        return self._thread

    # -- moving on ---------------------------------------------------------------------------------------------------

    def start(self) -> bool:
        """Start the next post that is not held, whenever it is due.  False where there is none, or one is started
        already.
        """
        with self._lock:
            if self._started is not None:
                return False
            post = self._next()
            if post is None:
                return False
            self._begin(post)
        return True

    def finish(self) -> bool:
        """Copy what was started, and report it.  False where nothing is."""
        post = self._started
        if post is None:
            return False
        if post.landing is not None:
            self._carriage.copy(post)
        with self._lock:
            self._started = None
            self._carriage.finish(post)
        return True

    def step(self) -> bool:
        """Carry one post from start to finish.  False where there is none to carry."""
        return self.start() and self.finish()

    def hold(self, peer: PeerId) -> None:
        """Start nothing for ``peer`` until :meth:`resume`: a peer that accepts and does not progress."""
        with self._lock:
            self._held.add(peer)

    def resume(self, peer: PeerId) -> None:
        """Go on with what was held or has stalled for ``peer``."""
        with self._lock:
            self._held.discard(peer)
            for post in self.take_stalled(lambda post: post.chunk.peer == peer):
                post.stalls = False
                bisect.insort(self._queue, post, key=lambda queued: queued.rank)
            self._bell.notify()

    @property
    def pending(self) -> int:
        """Posts queued, stalled or started."""
        with self._lock:
            return len(self._queue) + len(self._stalled) + (self._started is not None)

    def _next(self) -> Post | None:
        """The first queued post that may start; posts that stall are put aside on the way."""
        while True:
            post = next((post for post in self._queue if post.chunk.peer not in self._held), None)
            if post is None or not post.stalls:
                return post
            self._queue.remove(post)
            self._stalled.append(post)

    def _begin(self, post: Post) -> None:
        self._queue.remove(post)
        self._started = post
        self._carriage.start(post)

    def _run(self) -> None:
        """The thread's life: sleep on the bell, carry, repeat."""
        while True:
            with self._lock:
                while not self._stopped:
                    post = self._next()
                    pause = post.due - self._clock() if post is not None else None
                    if post is not None and (pause is None or pause <= 0):
                        self._begin(post)
                        break
                    self._bell.wait(pause)
                else:
                    return
            self.finish()
