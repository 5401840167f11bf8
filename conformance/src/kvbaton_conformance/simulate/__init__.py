"""Whole deployments under seeded schedules with faults: every interleaving is one number, every failure a short story.

::

    python -m kvbaton_conformance.simulate --handoffs 10000 --seed 1

A *run* is one deployment on one clock that nobody else moves: the coordinator machine, real stages with their guards
and planners, engines, and a simulated transport.  Nothing happens by itself.  A seeded scheduler chooses one *move* at
a time: a stage's pump turns and hears some of what was said to it, an engine steps, a device event completes, a byte
lands, a receipt shows, time passes, a caller gives up, a process dies.  After each move the invariants are checked:

- no byte is written into memory that is not that transfer's reservation (C5.2), and none is read from memory that its
  owner has given up (C5.1);
- memory is given up only when nothing can touch it any more;
- every byte is there when a request is imported, and its tokens are those of an undisaggregated run (C4.2, A1);
- milestones go forward only, a request ends once, credits return once (C1.1, C2.5, C4);
- no correct peer is accused of breaking the protocol (C7.4);
- once faults stop, everything ends, with its tokens or with a cause, and the books balance (C6.7, C8.4).

A run begins with a *random part*, whose moves are kept, and ends with a *fair part* in which everybody gets their turn
and faults have stopped.  A run that fails is played again with fewer and fewer of its moves (a move that cannot be
made any more is passed over), until what is left is short; that is told as a story.

=====================  ======================================================================
``scenario``           what is drawn once for a run: sizes, limits, what the transport is like, which faults
``wire``               the simulated transport
``world``              the deployment, its moves, and the invariants
``run``                the scheduler: the random part and the fair part
``shrink``             fewer moves
``mutants``            each guard of the protocol removed: in how many runs is it found?
=====================  ======================================================================

An engine of one's own takes the scripted one's place in :class:`~kvbaton_conformance.simulate.world.World`.
"""
