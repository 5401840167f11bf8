"""T2, C1.4, C3.5: who is connected, and under which epoch."""

from __future__ import annotations

from typing import Any

import pytest

from kvbaton.connector import IDLE, Outcome
from kvbaton.errors import ConnectError, GeometryMismatch
from kvbaton.geometry import Component, KVGeometry, Plane
from kvbaton.guard import GuardedConnector
from kvbaton.identity import PeerId, new_transfer_id
from kvbaton_conformance.clauses import require
from kvbaton_conformance.scripted_connector import ScriptedConnector
from kvbaton_conformance.suite.guard.rig import CONNECT, D0, D1, ME, Rig, RigTopic, chunk, endpoint, refused

_STRANGERS: dict[str, dict[str, Any]] = {
    "another-transport": {"transport": "other"}, "another-version": {"version": "2"},
    "one-sided-geometry": {"geometry": b"something"}, "our-own-name": {"peer": PeerId(ME.name, 99)},
}  # fmt: skip


def geometry(token_bytes: int = 64, blocks: int = 8) -> bytes:
    plane = Plane("kv", (Component(0, 0, 16 * token_bytes, token_bytes),), blocks)
    return KVGeometry({"model": "m"}, 16, (plane,), 0).encode()


class Handshakes(RigTopic):
    """T2, C1.4, C3.5: a peer is up when it accepted us, once, and never again once it has gone."""

    @pytest.mark.clause("T2")
    @pytest.mark.parametrize("which", list(_STRANGERS))
    def test_a_stranger_is_refused_before_anything_is_connected(self, which: str) -> None:
        """Another transport, version or our own name."""
        rig = Rig()
        refused(lambda: rig.guard.connect(endpoint(**_STRANGERS[which])), ConnectError, "T2", f"{which} was accepted")
        require(
            not rig.plugin.called("connect") and not rig.guard.peer_states(), "T2",
            "a refused peer has left something behind", seen=rig.guard.peer_states(),
        )  # fmt: skip

    @pytest.mark.clause("C3.5", "T2")
    def test_geometry_is_compared_before_anything_is_connected(self) -> None:
        """Other bytes per token are refused with both values; another number of blocks is each side's own affair."""
        plugin = ScriptedConnector()
        guard = GuardedConnector(plugin, transport="scripted", version="1", peer=ME, geometry=geometry())
        guard.register([])
        error = refused(
            lambda: guard.connect(endpoint(geometry=geometry(token_bytes=32))), GeometryMismatch, "C3.5",
            "stages with other bytes per token were connected",
        )  # fmt: skip
        require("64" in str(error) and "32" in str(error), "C3.5", "both values are not named", seen=error)
        require(not plugin.called("connect"), "C3.5", "the plugin was asked to connect a stage of another geometry")
        guard.connect(endpoint(geometry=geometry(blocks=99)))
        require(plugin.called("connect") == [D0], "C3.5", "another number of blocks was refused")

    @pytest.mark.clause("T2", "T7")
    def test_an_unreachable_peer_is_down_by_its_deadline(self) -> None:
        """The plugin never says up: down, not before the deadline, not quiet, once; what comes later is dropped."""
        rig = Rig()
        rig.guard.connect(endpoint(D0))
        require(rig.guard.needs_polling, "T2", "the stage would stop to poll while a peer connects")
        rig.clock.advance(CONNECT - 0.1)
        require(rig.poll() is IDLE, "T2", "a connection was given up before its deadline")
        rig.clock.advance(0.1)
        events = [(event.peer, event.up, event.quiet) for event in rig.poll().peers]
        require(events == [(D0, False, False)], "T2", "an unreachable peer is not down by its deadline", seen=events)
        require(rig.plugin.called("disconnect") == [D0], "T2", "something half open stays behind")
        rig.plugin.up(D0)
        require(rig.poll() is IDLE, "T2", "a peer that is down came up by itself")

    @pytest.mark.clause("T2", "T7")
    def test_an_exception_from_connect_is_a_peer_that_is_down(self) -> None:
        """The plugin cannot: the stage hears of it from poll, with the reason."""
        rig = Rig()
        rig.plugin.raises["connect"] = OSError("no route")
        rig.guard.connect(endpoint(D0))
        events = rig.poll().peers
        require(
            len(events) == 1 and not events[0].up and "no route" in str(events[0].error), "T7",
            "a connect that raises is not reported as a peer that is down", seen=events,
        )  # fmt: skip

    @pytest.mark.clause("C1.4", "T2")
    def test_a_new_epoch_replaces_the_old_one(self) -> None:
        """Late receipts and endpoints of the old epoch are refused, and chunks for it fail and reach nobody."""
        rig = Rig(D0)
        reborn = PeerId(D0.name, D0.epoch + 1)
        rig.guard.connect(endpoint(reborn))
        rig.plugin.receive(D0, new_transfer_id(), 0)
        rig.plugin.up(reborn)
        progress = rig.poll()
        events = [(event.peer, event.up) for event in progress.peers]
        require(events == [(D0, False), (reborn, True)], "C1.4", "the old epoch is not down, or twice", seen=events)
        require(not progress.receipts, "C1.4", "a receipt of an older epoch was passed on", seen=progress.receipts)
        refused(lambda: rig.guard.connect(endpoint(D0)), ConnectError, "C1.4", "an older epoch was connected")
        rig.post(D0)
        ends = [(end.outcome, end.terminal) for end in rig.poll().completions]
        require(
            ends == [(Outcome.FAILED, True)] and not rig.plugin.called("submit"), "C1.4",
            "a chunk for an older epoch was sent", expected="failed, terminal, not given to the plugin", seen=ends,
        )  # fmt: skip

    @pytest.mark.clause("C6.4", "T2")
    def test_who_was_disconnected_stays_away(self) -> None:
        """Connecting twice is connecting once; after disconnect an epoch does not come back."""
        rig = Rig(D0)
        rig.guard.connect(endpoint(D0))
        require(rig.plugin.called("connect") == [D0], "T2", "a second connect() reached the plugin")
        rig.guard.disconnect(D0)
        refused(lambda: rig.guard.connect(endpoint(D0)), ConnectError, "C6.4", "a severed epoch was connected again")
        rig.plugin.down(D0, quiet=True)
        rig.poll()
        refused(lambda: rig.guard.connect(endpoint(D0)), ConnectError, "C6.4", "a fenced epoch was connected again")

    @pytest.mark.clause("C1.2", "C1.4", "T5")
    def test_what_nobody_asked_for_is_dropped_and_counted(self) -> None:
        """Completions, receipts and peers that nobody knows."""
        rig = Rig(D0)
        rig.plugin.complete(chunk())
        rig.plugin.receive(D1, new_transfer_id(), 0)
        rig.plugin.up(D1)
        rig.plugin.up(D0)
        require(rig.poll() is IDLE, "C1.2", "an event that nobody asked for was passed on")
        counted = [
            rig.figure(f"dropped_{reason}")
            for reason in ("completion_unknown", "receipt_unknown_peer", "event_unknown_peer", "event_up_again")
        ]
        require(counted == [1, 1, 1, 1] and rig.balanced(), "C1.2", "what was dropped is not counted", seen=counted)

    @pytest.mark.clause("C6.4", "T7")
    def test_down_is_said_once_and_quiet_once(self) -> None:
        """However often the plugin says so; and receipts count until the fence, not after it."""
        rig = Rig(D0)
        rig.plugin.down(D0)
        rig.plugin.receive(D0, new_transfer_id(), 0)
        first = rig.poll()
        rig.plugin.receive(D0, new_transfer_id(), 0)
        for quiet in (False, True, True, False):
            rig.plugin.down(D0, quiet=quiet)
        second = rig.poll()
        rig.plugin.receive(D0, new_transfer_id(), 0)
        quiets = [event.quiet for event in (*first.peers, *second.peers)]
        require(quiets == [False, True], "T7", "down, or quiet, was not said exactly once", seen=quiets)
        require(
            len(first.receipts) == len(second.receipts) == 1 and rig.poll() is IDLE, "C6.4",
            "what had arrived before the fence was dropped, or a receipt after it was passed on", seen=rig,
        )  # fmt: skip
