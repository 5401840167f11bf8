"""Two real processes of one transport on this host that move given segments and say how long it took.

``kvbaton doctor`` and ``kvbaton bench`` measure with it.  Each end is a process of its own with a guarded connector,
opened by name and options as a stage would open it, so that transports that must not share a process never do::

    with open_pair("nixl", {}, regions=(64 << 20,)) as pair:
        reads = writes = Segments.one(0, 0, 1 << 20)
        pair.forward.prepare()                              # pattern at the source, poison at the target
        moved = pair.forward.move(reads, writes, repeats=20)
        moved.received                                      # seconds until the target had its receipts, each time
        pair.forward.check(reads, writes)                   # raises PairFailed where a byte is not what it must be
        pair.forward.copy(reads, writes, repeats=20)        # the same by plain copying into shared memory, to compare
        pair.back.move(...)                                 # the other direction

Device memory (``memory="cuda"``) is allocated through CUDA's driver, on ``devices``.  Everything is bounded.  What goes
wrong is a ``PairFailed`` whose text names the end and the cause, also where a process hangs or dies; the pair is
of no use afterwards.  Nothing is left behind on leaving: both processes have then been joined.

``Way.call`` runs a function of the caller's in an end's process, for a baseline by a library's own interface.
"""

from __future__ import annotations

from kvbaton.pair.pair import Bounds, Moved, Pair, PairFailed, Way, open_pair

__all__ = ["Bounds", "Moved", "Pair", "PairFailed", "Way", "open_pair"]
