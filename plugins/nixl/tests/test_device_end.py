"""What is said of device memory when a link ends: only what the device has said (T5, C6.4)."""

import pytest

from kvbaton.connector import MemoryRegion, Outcome
from kvbaton.errors import PeerLost
from kvbaton_conformance.harness import Pair, segments
from kvbaton_nixl import cuda
from kvbaton_nixl import link as link_module

ON_DEVICE = MemoryRegion(0, "cuda", 0, 4096, 4096)


@pytest.fixture
def pair(open_here):
    pair = Pair(open_here("prefill-0"), open_here("decode-0", seed=1))
    pair.source.memory.fill()
    pair.connect()
    return pair


@pytest.fixture
def done(monkeypatch):
    """What was done, in order; ``done.answer``: what the device says."""

    class Done(list):
        answer = True

    done = Done()
    real = link_module.destroy
    monkeypatch.setattr(link_module, "destroy", lambda agent: (done.append("destroy"), real(agent)))
    monkeypatch.setattr(cuda, "synchronize", lambda region: done.append(region) or done.answer)
    return done


@pytest.mark.clause("T5", "C6.4")
@pytest.mark.parametrize("answer", [True, False])
def test_the_device_is_waited_for_after_the_agent_has_gone(pair, done, answer):
    """A write under way: its source is quiet where the device says so, and else is not."""
    pair.clog(pair.target)
    pair.send(segments((0, 0, 512)), segments((0, 0, 512)))
    (link,) = pair.source.connector._links.values()
    link._on_device, done.answer = ON_DEVICE, answer
    assert link.under_way
    (ended,) = link.end(PeerLost("gone", peer=link.peer), peer_is_dead=True)
    assert done == ["destroy", ON_DEVICE]
    assert (ended.source_quiet, ended.target_quiet) == (answer, answer)
    pair.source.connector._links.clear()
    pair.source.connector._finish([ended])


@pytest.mark.clause("C6.4")
def test_the_device_is_waited_for_where_the_peer_may_have_been_writing(pair, done):
    """Nothing of ours is under way; what a dead peer had sent may be on its way into our memory."""
    (link,) = pair.target.connector._links.values()
    link._on_device = ON_DEVICE
    pair.target.connector.fenced(pair.source.peer)
    assert done == ["destroy", ON_DEVICE]
    (event,) = pair.target.connector.poll().peers
    assert event.quiet


@pytest.mark.clause("C6.4")
def test_no_fence_is_claimed_where_the_device_has_failed(pair, done, monkeypatch):
    (link,) = pair.target.connector._links.values()
    link._on_device, done.answer = ON_DEVICE, False
    here = pair.target.connector
    monkeypatch.setattr(here, "_enter", lambda regions: None)
    regions, here._regions = here._regions, (ON_DEVICE,)
    for _ in range(2):
        here.fenced(pair.source.peer)
        assert not any(event.quiet for event in here.poll().peers)
    done.answer = True
    here.fenced(pair.source.peer)
    assert [event.quiet for event in here.poll().peers] == [True]
    here._regions = regions


@pytest.mark.clause("C6.4", "T5", "T7")
def test_a_copy_that_cannot_be_waited_for_loses_no_chunk_and_proves_nothing(pair, done):
    """The device has failed, and says so when staging is closed: every chunk ends, none as quiet."""
    pair.clog(pair.target)
    pair.send(segments((0, 0, 512)), segments((0, 0, 512)))
    here = pair.source.connector
    (link,) = here._links.values()
    (posted,) = link.posted.values()

    class Mover:
        region = ON_DEVICE

        def close(self):
            raise RuntimeError("the device has failed")

    link._on_device, link._mover = ON_DEVICE, Mover()
    here._lose(link.peer, PeerLost("gone", peer=link.peer))
    progress = here.poll()
    (completion,) = progress.completions
    assert (completion.outcome, completion.source_quiet, completion.target_quiet) == (Outcome.FAILED, False, False)
    assert [(event.up, event.quiet) for event in progress.peers] == [(False, False)]
    here._finish([link_module.Ended(posted.chunk, Outcome.FAILED, True, True)])  # for whoever closes it now


@pytest.mark.clause("C6.4")
def test_nobody_waits_where_both_have_said_that_nothing_is_under_way(pair, done):
    for end in (pair.source, pair.target):
        for link in end.connector._links.values():
            link._on_device = ON_DEVICE
    pair.target.guard.disconnect(pair.source.peer)
    pair.pump_until(lambda: pair.target.told_quiet(pair.source.peer) and pair.source.told_quiet(pair.target.peer), "")
    assert done == ["destroy", "destroy"]


@pytest.mark.parametrize(("status", "quiet"), [(0, True), (700, False)])
def test_a_device_that_has_failed_says_nothing(monkeypatch, status, quiet):
    called = []

    class Driver:
        def cuPointerGetAttribute(self, *_):
            return 1

        def cuCtxSynchronize(self):
            called.append("synchronize")
            return status

    monkeypatch.setattr(cuda, "_driver", Driver)
    assert cuda.synchronize(ON_DEVICE) is quiet
    assert called == ["synchronize"]


def test_without_a_driver_nothing_is_said(monkeypatch):
    monkeypatch.setattr(cuda, "_driver", lambda: None)
    assert not cuda.synchronize(ON_DEVICE)
