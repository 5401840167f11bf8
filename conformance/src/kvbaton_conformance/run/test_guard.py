"""What every connector gets from core, whichever is named."""

from kvbaton_conformance.suite.guard import GuardConformance


class TestGuard(GuardConformance):
    """Set nothing: it judges core's guard."""
