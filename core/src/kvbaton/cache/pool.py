"""The blocks of one cache and what holds each of them.

A block is in exactly one of four states, and every change of state is one O(1) operation here:

=========  ====================================  =====================================
state      owners, leases                        leaves it by
=========  ====================================  =====================================
free       none                                  ``take``
used       at least one owner                    the last ``disown``
deferred   no owner, at least one lease          the last ``unlease``, or ``own`` (C8.1)
cached     none, but its content has a name      ``own``, or eviction, oldest first
=========  ====================================  =====================================
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

from kvbaton.errors import CacheError


class BlockPool:
    """``blocks`` blocks with reference counts; nothing is known here of tokens or sequences.

    Reuse prefers what was freed last, in the order in which it was taken, so that runs of neighbours stay together.
    """

    def __init__(self, blocks: int) -> None:
        if blocks < 1:
            raise CacheError(f"a cache needs at least one block, not {blocks}", blocks=blocks)
        self.blocks = blocks
        self._free = list(range(blocks - 1, -1, -1))
        self._owners = [0] * blocks
        self._leases = [0] * blocks
        #: The name of a block's content, while other sequences may find it by that name.
        self._name: list[bytes | None] = [None] * blocks
        self._named: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._used = 0
        self._deferred = 0

    # -- figures -------------------------------------------------------------------------------------------------------

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self._used

    @property
    def deferred(self) -> int:
        """Blocks that nobody owns any more and that a lease still holds."""
        return self._deferred

    @property
    def cached(self) -> int:
        """Blocks that nobody holds and that are kept for their content."""
        return len(self._cached)

    @property
    def named(self) -> int:
        """Blocks, held or cached, that can be found by their content."""
        return len(self._named)

    @property
    def available(self) -> int:
        """How many blocks ``take`` could hand out now."""
        return len(self._free) + len(self._cached)

    # -- owners --------------------------------------------------------------------------------------------------------

    def take(self, count: int) -> list[int] | None:
        """``count`` blocks with one owner each and no content, evicting cached ones, oldest first.  None: too few."""
        if count > self.available:
            return None
        while len(self._free) < count:
            self._evict()
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        taken.reverse()
        for block in taken:
            self._owners[block] = 1
        self._used += count
        return taken

    def own(self, block: int) -> None:
        """One more owner of a block that is not free."""
        if self._owners[block] == 0:
            if self._leases[block]:
                self._deferred -= 1
            elif block in self._cached:
                del self._cached[block]
            else:
                raise CacheError(f"block {block} is free: it has no content to share", block=block)
            self._used += 1
        self._owners[block] += 1

    def disown(self, block: int) -> None:
        """One owner fewer.  The last one frees the block, or leaves that to the end of its last lease (C8.1)."""
        if self._owners[block] == 0:
            raise CacheError(f"block {block} has no owner to give it back", block=block)
        self._owners[block] -= 1
        if self._owners[block] == 0:
            self._used -= 1
            if self._leases[block]:
                self._deferred += 1
            else:
                self._settle(block)

    # -- leases --------------------------------------------------------------------------------------------------------

    def lease(self, block: int) -> None:
        """One more lease on a block that has an owner."""
        if self._owners[block] == 0:
            raise CacheError(f"block {block} has no owner: nothing is there to lease", block=block)
        self._leases[block] += 1

    def unlease(self, block: int) -> None:
        """One lease fewer.  The last one frees a block whose owners are gone already, once (C8.1)."""
        if self._leases[block] == 0:
            raise CacheError(f"block {block} has no lease to end", block=block)
        self._leases[block] -= 1
        if self._leases[block] == 0 and self._owners[block] == 0:
            self._deferred -= 1
            self._settle(block)

    # -- content -------------------------------------------------------------------------------------------------------

    def publish(self, block: int, name: bytes) -> bool:
        """Let others find an owned block by the name of its content.  False: another one has that name already."""
        if self._owners[block] == 0:
            raise CacheError(f"block {block} has no owner who could vouch for its content", block=block)
        if self._name[block] is not None:
            raise CacheError(f"block {block} is published already; published content never changes", block=block)
        if name in self._named:
            return False
        self._named[name] = block
        self._name[block] = name
        return True

    def find(self, name: bytes) -> int | None:
        """The block with this content, if there is one: used, deferred or cached."""
        return self._named.get(name)

    def is_cached(self, block: int) -> bool:
        return block in self._cached

    def drop_cached(self) -> int:
        """Evict every cached block; how many there were."""
        count = len(self._cached)
        for _ in range(count):
            self._evict()
        return count

    def _evict(self) -> None:
        block, _ = self._cached.popitem(last=False)
        self._forget(block)
        self._free.append(block)

    def _forget(self, block: int) -> None:
        name = self._name[block]
        if name is not None:
            del self._named[name]
            self._name[block] = None

    def _settle(self, block: int) -> None:
        """Nobody holds ``block`` any more."""
        if self._name[block] is None:
            self._free.append(block)
        else:
            self._cached[block] = None

    # -- proof ---------------------------------------------------------------------------------------------------------

    def check(self, owners: Iterable[int], leases: Iterable[int]) -> None:
        """Raise :class:`CacheError` unless the books are exactly what these holders add up to.

        ``owners`` and ``leases`` name a block once per owner and once per lease.
        """
        expected_owners, expected_leases = Counter(owners), Counter(leases)
        for block in range(self.blocks):
            if self._owners[block] != expected_owners[block] or self._leases[block] != expected_leases[block]:
                raise CacheError(
                    f"C8: block {block} has {self._owners[block]} owners and {self._leases[block]} leases in the books,"
                    f" {expected_owners[block]} and {expected_leases[block]} in truth", block=block,
                )  # fmt: skip
        free = set(self._free)
        states = Counter(
            "used" if self._owners[b] else "deferred" if self._leases[b] else "cached" if b in self._cached else "free"
            for b in range(self.blocks)
        )
        books = {"used": self._used, "deferred": self._deferred, "cached": self.cached, "free": self.free}
        if dict(states) != {state: count for state, count in books.items() if count} or len(free) != self.free:
            raise CacheError(f"C8: blocks in truth {dict(states)}, in the books {books}", books=books)
        if self.free + self.used + self.deferred + self.cached != self.blocks:
            raise CacheError(f"C8: {books} do not add up to {self.blocks} blocks", books=books)
        if any(self._name[block] is not None for block in free):
            raise CacheError("C8: a free block can still be found by its content")
        if any(self._name[block] != name for name, block in self._named.items()):
            raise CacheError("C8: a name leads to a block with another content")
        if sum(name is not None for name in self._name) != len(self._named):
            raise CacheError("C8: a published block cannot be found by its name")
