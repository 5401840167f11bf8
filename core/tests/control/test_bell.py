"""Bells: no ring is missed, whoever rings when, and rings that nobody has waited for are one."""

from __future__ import annotations

import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

import pytest

from kvbaton.control.bell import Bell, DescriptorBell

ITEMS, RINGERS = 500, 3
#: A waiter that misses a ring waits for so long.
LONG = 20.0


def never() -> bool:
    return False


@pytest.fixture
def descriptor() -> Iterator[DescriptorBell]:
    bell = DescriptorBell()
    yield bell
    bell.close()


def all_heard(ring: Callable[[], None], wait: Callable[[Callable[[], object]], None]) -> bool:
    """Several threads put things into a queue and ring; whether one that waits gets all of them without a long pause.

    Each ringer waits until its item was taken before it puts the next one, so that the waiter sleeps all the time.
    """
    box: deque[threading.Semaphore] = deque()

    def ringer() -> None:
        taken = threading.Semaphore(0)
        for _ in range(ITEMS):
            box.append(taken)
            ring()
            if not taken.acquire(timeout=2 * LONG):
                return

    threads = [threading.Thread(target=ringer, daemon=True) for _ in range(RINGERS)]
    for thread in threads:
        thread.start()
    got, give_up = 0, time.monotonic() + LONG
    while got < ITEMS * RINGERS and time.monotonic() < give_up:
        wait(lambda: box)
        while box:
            box.popleft().release()
            got += 1
    for thread in threads:
        thread.join(LONG)
    return got == ITEMS * RINGERS


def test_of_rings_by_many_threads_none_is_missed() -> None:
    bell = Bell()
    assert all_heard(bell.ring, lambda unless: bell.wait(LONG, unless))


def test_of_rings_by_many_threads_none_is_missed_by_who_watches_the_descriptor(descriptor: DescriptorBell) -> None:
    def wait(unless: Callable[[], object]) -> None:
        del unless
        select.select([descriptor.fileno()], (), (), LONG)
        descriptor.hush()

    assert all_heard(descriptor.ring, wait)


def test_a_ring_is_remembered_once_and_used_up() -> None:
    bell = Bell()
    bell.ring()
    bell.ring()
    began = time.monotonic()
    bell.wait(LONG, never)
    assert time.monotonic() - began < LONG / 2
    began = time.monotonic()
    bell.wait(0.02, never)
    assert time.monotonic() - began >= 0.02, "two rings are one"
    bell.ring()
    bell.wait(LONG, lambda: True)
    bell.wait(-1.0, never)
    began = time.monotonic()
    bell.wait(0.02, never)
    assert time.monotonic() - began >= 0.02, "used up by a wait that had no need of it"


def test_a_descriptor_is_readable_from_a_ring_until_it_is_hushed(descriptor: DescriptorBell) -> None:
    def readable() -> bool:
        return bool(select.select([descriptor.fileno()], (), (), 0)[0])

    assert not readable()
    descriptor.hush()
    for _ in range(2):
        descriptor.ring()
        descriptor.ring()
        assert readable()
        descriptor.hush()
        assert not readable()


def test_a_closed_bell_is_rung_and_hushed_without_effect() -> None:
    bell = DescriptorBell()
    bell.ring()
    bell.close()
    bell.close()
    bell.ring()
    bell.hush()
