"""Slots for final payloads: a handful of rows that are taken and given back."""

from __future__ import annotations

from kvbaton.errors import CacheError


class SlotPool:
    """``slots`` slots, each held by at most one transfer."""

    def __init__(self, slots: int) -> None:
        if slots < 0:
            raise CacheError(f"the number of slots cannot be {slots}", slots=slots)
        self.slots = slots
        self._free = list(range(slots - 1, -1, -1))
        self._held: set[int] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int | None:
        """A slot that nobody holds; None when all are held."""
        if not self._free:
            return None
        slot = self._free.pop()
        self._held.add(slot)
        return slot

    def give(self, slot: int) -> None:
        """Give a held slot back, once."""
        if slot not in self._held:
            raise CacheError(f"final slot {slot} is not held: it was given back already or never taken", slot=slot)
        self._held.remove(slot)
        self._free.append(slot)

    def check(self) -> None:
        """Raise :class:`CacheError` unless every slot is either free or held."""
        if sorted([*self._free, *self._held]) != list(range(self.slots)):
            raise CacheError(f"C8: final slots {sorted(self._free)} free, {sorted(self._held)} held, of {self.slots}")
