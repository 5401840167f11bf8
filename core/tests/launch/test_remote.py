"""Stages of other hosts: what counts as the end of one, and what never does."""

import pytest

from kvbaton.control.zmq import Departure
from kvbaton.errors import KvbatonError, StageLost
from kvbaton.launch import StageSpec
from kvbaton.launch.remote import RemoteLauncher

SPEC = StageSpec(name="prefill-0", role="prefill", entry="nowhere:nothing")


class Channels:
    """As much of the coordinator's channels as a launcher uses; nothing of it is a socket."""

    def __init__(self):
        self.added, self.removed, self.expelled, self.known, self.gone = [], [], [], set(), []

    def add(self, peer):
        self.added.append(peer)

    def remove(self, peer):
        self.removed.append(peer)

    def expel(self, peer, cause):
        self.expelled.append((peer, cause))

    def introduced(self, peer):
        return peer in self.known

    def departures(self):
        found, self.gone = self.gone, []
        return found

    def wake(self):
        pass


@pytest.fixture
def started():
    channels = Channels()
    launcher = RemoteLauncher(channels, patience=0.0)
    handle = launcher.start(SPEC)
    assert channels.added == [handle.peer]
    channels.known.add(handle.peer)
    return channels, launcher, handle


@pytest.mark.clause("C6.4")
@pytest.mark.parametrize(("status", "joined"), [(0, True), (1, False), (None, False)])
def test_only_the_word_that_all_is_drained_and_closed_counts_as_joined(started, status, joined):
    channels, launcher, handle = started
    assert launcher.exited() == []
    assert (handle.exit_status(), handle.joined, handle.death()) == (None, False, None)
    channels.gone.append(Departure(handle.peer, status, "its connection ended"))
    assert launcher.exited() == [handle]
    assert (handle.exit_status(), handle.joined) == (status, joined)
    assert launcher.exited() == []
    launcher.close()


@pytest.mark.clause("C6.4", "C6.3")
def test_a_lost_stage_says_that_it_is_not_fenced(started):
    channels, launcher, handle = started
    channels.gone.append(Departure(handle.peer, None, "its connection ended"))
    launcher.exited()
    death = handle.death()
    assert isinstance(death, StageLost)
    assert death.stage == "prefill-0"
    assert "C6.4: stage prefill-0 is lost: its connection ended" in str(death)
    assert "not fenced" in str(death)


@pytest.mark.clause("C6.4")
def test_one_that_was_given_up_is_not_joined_whatever_it_says_then(started):
    channels, launcher, handle = started
    launcher._patience = 60.0
    handle.kill()
    assert launcher.exited() == []
    assert [peer for peer, _ in channels.expelled] == [handle.peer]
    channels.gone.append(Departure(handle.peer, 0, "its connection ended"))
    assert launcher.exited() == [handle]
    assert not handle.joined


@pytest.mark.clause("C6.7")
def test_one_that_does_not_end_when_it_is_told_to_is_lost(started):
    _, launcher, handle = started
    handle.kill()
    launcher.exited()
    assert launcher.exited() == [handle]
    assert not handle.joined
    assert "did not within 0 s" in str(handle.death())


def test_one_that_never_came_holds_nothing(started):
    channels, launcher, handle = started
    channels.known.clear()
    handle.kill()
    assert launcher.exited() == [handle]
    assert handle.joined
    assert channels.removed == [handle.peer], "it finds nobody who expects it if it comes after all"


def test_what_is_still_there_when_the_launcher_closes_is_named(started):
    channels, launcher, handle = started
    with pytest.raises(KvbatonError, match=r"prefill-0@.*still there"):
        launcher.close()
    assert channels.expelled == [(handle.peer, "the coordinator ends")]
    launcher.close()
