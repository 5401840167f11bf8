"""The kit is proved by mutants: connectors, guards, machines, stages and engines, each broken in exactly one way.

Every mutant must be caught by the standard tests, by a clause that it breaks, and every standard test must catch at
least one.  ``python -m kvbaton_conformance.mutants`` finds out and writes the table of ``docs/mutants.md``.

What is broken in core is broken by an *edit*: a piece of the source of one function is replaced, which must occur in
it exactly once, so that a mutant that no longer fits is an error.  What is broken in a transport is a subclass of
:mod:`~kvbaton_conformance.mutants.reference`, a small connector that keeps the contract.

The names with a prefix ``C.``, ``P.``, ``D.`` and ``T.`` are the guards of the protocol's model: each was proved to be
needed by removing it there, and is removed here from the real thing.
"""

from __future__ import annotations

from kvbaton_conformance.mutants.mutant import Mutant, Place

__all__ = ["Mutant", "Place", "mutants"]


def mutants() -> dict[str, Mutant]:
    """Every mutant by its name, in the order of the table."""
    from kvbaton_conformance.mutants import connectors, coordinator, destination, engines, guards, source, stages

    found: dict[str, Mutant] = {}
    for module in (coordinator, source, destination, connectors, guards, stages, engines):
        for mutant in module.MUTANTS:
            if mutant.name in found:
                raise ValueError(f"two mutants are called {mutant.name}")
            found[mutant.name] = mutant
    return found
