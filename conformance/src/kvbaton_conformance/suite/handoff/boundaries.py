"""Where a hand-off can be stopped: one function per boundary, each with what must be true there.

A boundary is reached with the request ``a`` submitted.  What holds the world there stays held until
:meth:`~kvbaton_conformance.deployment.Deployment.let_go`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvbaton.handoff.table import DestinationPhase, SourcePhase
from kvbaton_conformance.clauses import require
from kvbaton_conformance.deployment import Deployment


@dataclass(frozen=True)
class Boundary:
    """``reach`` goes there; ``p`` and ``d`` are the phases that the two machines are then in."""

    name: str
    reach: Callable[[Deployment], None]
    p: SourcePhase | None
    d: DestinationPhase | None

    def go(self, world: Deployment) -> None:
        self.reach(world)
        require(
            (world.p, world.d) == (self.p, self.d), "C4", f'the boundary "{self.name}" is not what it was',
            expected=f"P {self.p}, D {self.d}", seen=f"P {world.p}, D {world.d}\n{world.describe()}",
        )  # fmt: skip


def reserving(world: Deployment) -> None:
    """Reserve is on its way; D's engine has not answered."""
    world.seats["decode-0"].engine_frozen = True
    world.run_until(lambda: world.d is DestinationPhase.RESERVING, "C2.1: D gets the Reserve")


def reserved(world: Deployment) -> None:
    """D holds memory; P has not been told."""
    world.hold_mail("to", "prefill-0")
    world.run_until(lambda: world.d is DestinationPhase.RESERVED, "C2.1: D reserves")
    world.settle()


def computing(world: Deployment) -> None:
    """P's device works on the first range."""
    world.seats["prefill-0"].device_runs = False
    world.run_until(lambda: world.seats["prefill-0"].device.pending() > 0, "C2.1: P starts to compute")
    world.settle()


def posted(world: Deployment) -> None:
    """The transport has the first chunk and takes no more; P still computes."""
    seat = world.seats["prefill-0"]
    seat.engine_frozen = True
    world.hold()
    world.run_until(lambda: world.p is SourcePhase.PREFILLING, "C2.1: P is told")
    seat.loop.advance()  # Admit, and the first range
    world.run_until(lambda: seat.guard.outstanding() > 0, "T6: the transport takes the first chunk")
    world.begin()


def committed(world: Deployment) -> None:
    """Every chunk is with the transport, the first can be taken back no more, and none has ended."""
    world.hold()
    world.run_until(lambda: world.p is SourcePhase.COMMITTED, "C4: P submits its last chunk")
    world.begin()
    world.settle()


def received(world: Deployment) -> None:
    """D has everything; its engine has not imported it.  P is acknowledged and has retired."""
    # D's engine has work to do before it stands still: the reservation
    world.hold()
    world.run_until(lambda: world.d is DestinationPhase.RESERVED, "C2.1: D reserves")
    world.seats["decode-0"].engine_frozen = True
    world.run_until(lambda: world.p is SourcePhase.COMMITTED, "C4: P submits its last chunk")
    world.flow = True
    for seat in world.seats.values():
        seat.gate.let_go()
    world.run_until(
        lambda: world.d is DestinationPhase.RECEIVED and world.p is None,
        "C4.1: with the commit and every receipt D has received, and P retires without D's engine",
    )


def decoding(world: Deployment) -> None:
    """D has produced the first tokens and stands still."""
    world.run_until(lambda: world.d is DestinationPhase.ACTIVE, "C2.3: D's scheduler admits the request")
    world.seats["decode-0"].engine_frozen = True
    world.settle()


P, D = SourcePhase, DestinationPhase

BOUNDARIES = (
    Boundary("reserving", reserving, None, D.RESERVING),
    Boundary("reserved", reserved, None, D.RESERVED),
    Boundary("computing", computing, P.PREFILLING, D.RESERVED),
    Boundary("posted", posted, P.PREFILLING, D.RESERVED),
    Boundary("committed", committed, P.COMMITTED, D.RESERVED),
    Boundary("received", received, None, D.RECEIVED),
    Boundary("decoding", decoding, None, D.ACTIVE),
)

#: Those at which a writer may still touch D's memory.
EXPOSED = tuple(boundary for boundary in BOUNDARIES if boundary.p is not None)
