"""The engine that holds KV and computes nothing: what it reports, and that it looks at what arrives."""

from pathlib import Path

import numpy as np
import pytest

from kvbaton import cuda
from kvbaton.bench.engine import BenchEngine, BenchOptions, plugin
from kvbaton.bench.models import Model
from kvbaton.bench.traffic import Traffic
from kvbaton.engine import Admission, Request, Role, SamplingParams
from kvbaton.errors import KvbatonError
from kvbaton.identity import new_transfer_id

TRAFFIC = Traffic(Model("small", layers=3, kv_heads=2, head_dim=4, planes=2, hidden=5), 24, 4)
WHOLE = Request((1,) * 24, SamplingParams(max_tokens=1))


class Callbacks:
    def __init__(self):
        self.ranges, self.reservations, self.refusals, self.active = [], [], [], []

    def can_schedule(self, transfer, tokens):
        return True

    def prefill_submitted(self, computed):
        self.ranges.append(computed)

    def reserved(self, reservation):
        self.reservations.append(reservation)

    def refused(self, transfer, reason, retry):
        self.refusals.append((reason, retry))

    def activated(self, transfer):
        self.active.append(transfer)


def started(role, requests=2, traffic=TRAFFIC, device=None):
    engine = BenchEngine(role, traffic, requests, device)
    regions, told = engine.regions(None), Callbacks()
    engine.attach(told)
    return engine, regions, told


def hand_over(layout="block", damage=0):
    """One whole request, copied by hand along its tables; ``damage``: 1 to its KV, 2 to its final payload."""
    traffic = Traffic(TRAFFIC.model, 24, 4, layout)
    p, here, said_p = started(Role.PREFILL, traffic=traffic)
    d, there, said_d = started(Role.DECODE, traffic=traffic)
    transfer = new_transfer_id()
    for engine in (d, p):
        engine.reserve_transfer(Admission(transfer, WHOLE))
    p.step()
    (computed,), (reserved,) = said_p.ranges, said_d.reservations
    from kvbaton.geometry import KVMap

    reads, writes = KVMap(p.geometry, d.geometry).plan(computed.tables, reserved.arrays(), 0, 24)
    for (source, at, length), (target, to, _) in zip(reads.triples(), writes.triples(), strict=True):
        there[target].view()[to : to + length] = here[source].view()[at : at + length]
    final = p.geometry.final_segment(computed.final_slot), d.geometry.final_segment(reserved.final_slot)
    (at,), (to,) = (segments.offset for segments in final)
    there[1].view()[to : to + 10] = here[1].view()[at : at + 10]
    if damage:
        there[damage - 1].view()[int((writes, final[1])[damage - 1].offset[-1])] ^= 1
    d.accept_import(transfer, 24)
    return d, said_d, transfer


@pytest.mark.parametrize("layout", ["block", "layer"])
def test_a_hand_over_is_looked_at_once_and_answered_with_one_token(layout):
    engine, said, transfer = hand_over(layout)
    (output,) = engine.step()
    assert (output.transfer, output.token_ids, output.error) == (transfer, (1,), None)
    assert said.active == [transfer]
    engine.release_transfer(transfer)
    assert engine.statistics()["final_slots_free"] == 2


@pytest.mark.parametrize(("layout", "damage"), [("block", 1), ("layer", 1), ("block", 2)])
@pytest.mark.clause("T3")
def test_one_wrong_byte_is_seen(layout, damage):
    with pytest.raises(KvbatonError, match="1 bytes are wrong"):
        hand_over(layout, damage)


def test_what_has_no_room_waits_and_what_never_fits_does_not():
    engine, _, told = started(Role.DECODE, requests=1)
    engine.reserve_transfer(Admission(new_transfer_id(), WHOLE))
    engine.reserve_transfer(Admission(new_transfer_id(), WHOLE))
    engine.reserve_transfer(Admission(new_transfer_id(), Request((1,) * 25)))
    assert [retry for _, retry in told.refusals] == [True, False]


def test_places_take_turns():
    engine, _, told = started(Role.DECODE, requests=2)
    seen = []
    for _ in range(4):
        transfer = new_transfer_id()
        engine.reserve_transfer(Admission(transfer, WHOLE))
        seen.append(told.reservations[-1].final_slot)
        engine.release_transfer(transfer)
    assert seen == [0, 1, 0, 1]


def test_options_say_all_of_the_traffic():
    options = BenchOptions.model_validate(BenchOptions.of(TRAFFIC, 3).model_dump())
    engine = plugin.open("any", options, Role.PREFILL, None)
    assert engine.geometry.encode() != b""
    assert options.traffic().request_bytes == TRAFFIC.request_bytes
    assert engine.capacity().blocks == 3 * 7 * 2


def test_device_memory_goes_through_the_driver_and_is_given_back(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "pair"))
    from made_up_devices import Devices

    devices = Devices()
    monkeypatch.setattr(cuda, "load", lambda: devices)
    p, regions, _ = started(Role.PREFILL, device=0)
    assert {region.kind for region in regions} == {"cuda"}
    assert np.count_nonzero(devices.arrays[regions[0].address][1]) == regions[0].length
    d, _, _ = started(Role.DECODE, device=1)
    transfer = new_transfer_id()
    d.reserve_transfer(Admission(transfer, WHOLE))
    with pytest.raises(KvbatonError, match="bytes are wrong"):
        d.accept_import(transfer, 24)
    for region, rows, ids, values in d._expected(0, 24):
        d._memory[region].fill(rows, ids, values)
    d.accept_import(transfer, 24)
    p.close()
    d.close()
    assert not devices.arrays
