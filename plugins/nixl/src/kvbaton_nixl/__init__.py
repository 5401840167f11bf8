"""kvbaton over NIXL: one-sided writes through UCX, within a host or between hosts.

What NIXL gives and what the contract asks differ in one place that decides the design: *when nothing can be written
any more*.  Releasing a transfer that is under way is no cancel, deregistering memory stops nothing, and bytes of a
writer that was killed and joined are still written by the target's own next progress call, because they wait in its
sockets.  What does stop them for good is the end of the agent that owns those sockets and registrations.  So:

**Each peer has an agent of its own.**  A connector's *link* to a peer is a NIXL agent, with its own UCX worker,
connections and registrations, that nobody else uses.  To fence a dead peer is to destroy its link: no socket, no
registration is left through which a byte could come.  Other peers do not notice.  An agent costs 20 ms, 15 descriptors
and a quarter of a MiB.

**The lobby.**  The endpoint that others are given has to exist before the peers are known.  It is the address of one
further agent, the *lobby*, which has no memory and hears *hellos* only: the address of the link that was made for whom
it greets, and the regions that may be written through it.

**Evidence.**  A chunk is one WRITE with a notification.  NIXL sends it when the initiator sees the write complete at
the target, so receipts come after their bytes (T3), and DONE at the source means written at the target (T5).  A
*bye* says that its sender has nothing under way and will post nothing more; when both have said it, the end is quiet.
Without it only the peer's death makes it quiet, and that core finds out (``fenced``): a live peer on the same host
writes straight into our memory, whatever becomes of our agent.

**Liveness.**  NIXL never reports a peer that is gone while nothing is under way, but refuses to notify it; so each
link sends a small *ping* now and then.

Modules: :mod:`~kvbaton_nixl.library` finds NIXL and maps its errors, :mod:`~kvbaton_nixl.words` is what peers say to
each other, :mod:`~kvbaton_nixl.descriptors` turns segments into addresses, :mod:`~kvbaton_nixl.staging` is where
short ones are packed, on a device by the kernel of :mod:`~kvbaton_nixl.kernels`, :mod:`~kvbaton_nixl.link` is one peer,
:mod:`~kvbaton_nixl.connector` is the promise.
"""

from __future__ import annotations

from kvbaton_nixl.plugin import NixlPlugin

#: The object behind the entry point ``nixl`` of the group ``kvbaton.connectors``.
plugin = NixlPlugin()

__all__ = ["NixlPlugin", "plugin"]
