"""T1: memory is registered before use, and what cannot be reached is refused before anything happens."""

from __future__ import annotations

import numpy as np
import pytest

from kvbaton.connector import MAX_ENDPOINT_BYTES, MemoryKind, MemoryRegion
from kvbaton.errors import CapabilityError, KvbatonError, LocalProtocolError, RegistrationError
from kvbaton_conformance.clauses import require
from kvbaton_conformance.device_memory import window
from kvbaton_conformance.harness import LocalEnd
from kvbaton_conformance.subject import Subject
from kvbaton_conformance.suite.topic import ConnectorTopic, Ends

_KINDS: tuple[MemoryKind, ...] = ("cuda", "host")


def every_kind_of_memory_is_declared(subject: Subject) -> str:
    """Why none is left to be refused, where none is."""
    return "every kind of memory is declared" if subject.capabilities.memory_kinds.issuperset(_KINDS) else ""


class Registration(ConnectorTopic):
    """T1: regions are registered once, before use; a refusal has no side effect; the memory outlives the connector."""

    @pytest.mark.clause("T1")
    def test_every_registered_region_is_reached(self, ends: Ends) -> None:
        """Eight regions; one chunk that reads and writes all of them.

        Troubleshooting:
        - only the first region works: its key, or its descriptor, is used for all;
        - bytes swapped between regions: ids are looked up by position, but they need not be 0, 1, 2.
        """
        ids = (3, 7, 1, 40, 2, 1000, 5, 6)
        pair = ends.pair(regions=dict.fromkeys(ids, 4096))
        sent = pair.send(
            pair.rows(*((id, 16 * number, 64) for number, id in enumerate(ids))),
            pair.rows(*((id, 32 * number, 64) for number, id in enumerate(reversed(ids)))),
        )
        pair.pump_until(lambda: sent.received and sent.done, "T1: a chunk over eight regions is received and done")
        pair.target.memory.check(sent.expected, "T1")

    @pytest.mark.clause("T1", "T2")
    def test_many_regions_fit_into_an_endpoint(self, ends: Ends) -> None:
        """256 regions, as an engine with a tensor per layer registers.

        Troubleshooting:
        - metadata that grows by a long key or a path per region: share what is common, or send it once connected.
        """
        end = ends.end("prefill-0", regions=dict.fromkeys(range(256), 4096))
        size = len(end.guard.endpoint().encode())
        require(
            size <= MAX_ENDPOINT_BYTES, "T2", "the endpoint of an end with 256 regions is too large to be sent",
            expected=f"at most {MAX_ENDPOINT_BYTES} bytes", seen=f"{size} bytes", look="metadata()",
        )  # fmt: skip

    @pytest.mark.clause("T1", "T13")
    @pytest.mark.absent_where(reason=every_kind_of_memory_is_declared)
    def test_memory_of_another_kind_is_refused_and_nothing_has_happened(self, ends: Ends) -> None:
        """A region of a kind that is not declared is refused, and the same connector then takes good ones.

        Troubleshooting:
        - the second registration fails: the first one had begun to register before it looked at every region.
        """
        pair = ends.pair(connect=False, register=False)
        for end in (pair.source, pair.target):
            end.apply(_refuses_other_kinds)
            end.apply(_registers_its_own)
        pair.connect()
        sent = pair.send(pair.rows((0, 0, 64)), pair.rows((1, 64, 64)))
        pair.pump_until(lambda: sent.received and sent.done, "T1: after a refusal, a good registration works")
        pair.target.memory.check(sent.expected, "T1")

    @pytest.mark.clause("T1")
    @pytest.mark.requires(memory_origin="allocated")
    def test_memory_of_another_origin_is_refused(self, ends: Ends) -> None:
        """A transport that takes only memory of its own refuses the rest by name."""
        end = ends.end("prefill-0", register=False)
        seen = end.apply(_registers_foreign_memory)
        require(
            seen == "RegistrationError", "T1", "memory that did not come from allocate() was registered",
            expected="RegistrationError", seen=seen, look="register()",
        )  # fmt: skip

    @pytest.mark.clause("T1")
    @pytest.mark.requires(memory_origin="allocated")
    def test_allocated_memory_is_zeroed_and_as_large_as_asked(self, ends: Ends) -> None:
        """``allocate`` gives zeroed memory of exactly the size that was asked for, different at each call."""
        end = ends.end("prefill-0", register=False, regions={})
        for problem in end.apply(_allocates_zeroed):
            require(False, "T1", problem, look="allocate()")

    @pytest.mark.clause("T1")
    def test_regions_are_registered_once(self, ends: Ends) -> None:
        """A second registration, and overlapping or empty regions, are refused before the plugin is called."""
        end = ends.end("prefill-0")
        before = end.calls("register")
        seen = end.apply(_registers_again)
        require(seen == "LocalProtocolError", "T1", "regions were registered a second time", seen=seen)
        require(end.calls("register") == before, "T1", "a second registration reached the plugin")

    @pytest.mark.clause("T1", "C5.4")
    def test_region_memory_outlives_close(self, ends: Ends) -> None:
        """After ``close()`` the bytes are still there, readable and writable: the engine owns them.

        Troubleshooting:
        - the process dies here: close() unmaps or frees region memory; what allocate() returned must keep itself alive
          through MemoryRegion.owner.
        """
        pair = ends.pair()
        sent = pair.send(pair.rows((0, 0, 512)), pair.rows((1, 64, 512)))
        pair.pump_until(lambda: sent.received and sent.done, "T3: one chunk is received and done")
        pair.finish(sent.chunk.transfer)
        for end in (pair.source, pair.target):
            end.guard.close()
        pair.target.memory.check(sent.expected, "T1")
        for end in (pair.source, pair.target):
            end.memory.poison()
            end.memory.read(pair.rows((0, 0, 4096)))


def _refuses_other_kinds(end: LocalEnd) -> None:
    undeclared = next(kind for kind in _KINDS if kind not in end.guard.capabilities.memory_kinds)
    try:
        end.guard.register([*end.memory.regions, MemoryRegion(999, undeclared, 0, 1 << 20, 4096)])
    except (RegistrationError, CapabilityError) as error:
        require(undeclared in str(error), "T1", "a refusal does not name the kind of memory", seen=error)
        return
    require(False, "T1", f"{undeclared} memory was registered, which is not declared", expected="RegistrationError")


def _registers_its_own(end: LocalEnd) -> None:
    end.guard.register(end.memory.regions)


def _registers_foreign_memory(end: LocalEnd) -> str:
    foreign = MemoryRegion.of_array(77, np.zeros(4096, np.uint8))
    return _raised(lambda: end.guard.register([*end.memory.regions, foreign]))


def _registers_again(end: LocalEnd) -> str:
    return _raised(lambda: end.guard.register(end.memory.regions))


def _allocates_zeroed(end: LocalEnd) -> list[str]:
    problems, addresses = [], set()
    for id, nbytes in enumerate((1, 4096, 65536 + 8)):
        region = end.guard.allocate(id, *end.memory.place, nbytes)
        addresses.add(region.address)
        if (region.id, region.length) != (id, nbytes):
            problems.append(
                f"allocate({id}, {nbytes} bytes) returned region {region.id} with {region.length} bytes: bounds are"
                " checked against what was asked for"
            )
        elif window(region).any():
            problems.append(f"allocate() of {nbytes} bytes returned memory that is not zeroed")
        end.memory.adopt(region)
    if len(addresses) != 3:
        problems.append("allocate() returned the same memory twice")
    end.guard.register(end.memory.regions)
    return problems


def _raised(action: object) -> str:
    """The class of what ``action()`` raises, or nothing."""
    assert callable(action)
    try:
        action()
    except LocalProtocolError as error:
        return "LocalProtocolError" if type(error) is LocalProtocolError else type(error).__name__
    except KvbatonError as error:
        return type(error).__name__
    return "nothing was raised"
