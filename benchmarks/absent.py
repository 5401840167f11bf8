"""What a benchmark raises where it cannot be run for want of something that this machine has not."""

from __future__ import annotations


class Absent(Exception):
    """Says what is missing; nothing was measured, and nothing is wrong."""
