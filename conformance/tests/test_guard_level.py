"""Core's guard passes its own level of the kit."""

from kvbaton_conformance import GuardConformance


class TestGuard(GuardConformance):
    pass
