"""The in-process reference transport of kvbaton: the one to read before writing another.

Stages that live in one process hand host memory to each other.  Nothing here is clever about networks; what it shows
is the *whole* contract of :mod:`kvbaton.connector`, T1 to T13, in as little code as that takes.  Read in this order:

:mod:`~kvbaton_loopback.ether`
    How two connectors find each other, and the one lock that guards all bookkeeping of this process.
:mod:`~kvbaton_loopback.wire`
    When a chunk is carried: the queue of one connector, its thread, and everything that an option can do to it.
:mod:`~kvbaton_loopback.connector`
    What is promised: registration, handshake, completions, receipts, grants, fences.
:mod:`~kvbaton_loopback.copying`
    How bytes move quickly from Python.

The design in six sentences.  A source's ``submit`` puts a chunk into its own *wire*, a queue with one thread.  The
wire *starts* one chunk at a time: under the lock it asks the destination whether this writer may still write for this
transfer, and notes at the destination that a copy is under way.  It copies without the lock.  Under the lock again it
*finishes*: a completion goes into the source's inbox, a receipt into the destination's, and ``poll`` hands out
inboxes.  So a receipt can never precede its bytes, and what was refused at the start was never written.  A side is
*quiet* for a peer exactly when nothing is queued, started or arriving between the two, which is counted, not assumed;
``disconnect``, ``revoke`` and ``close`` wait for that count by saying "not yet".

With ``carrier = "thread"`` the wire has its thread; with ``carrier = "manual"`` a test calls
``connector.wire.step()``, or ``start()`` and ``finish()`` with something in between.
"""

from __future__ import annotations

from kvbaton_loopback.plugin import LoopbackPlugin

#: The object behind the entry point ``loopback`` of the group ``kvbaton.connectors``.
plugin = LoopbackPlugin()

__all__ = ["LoopbackPlugin", "plugin"]
