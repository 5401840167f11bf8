"""T11, T10, T12: one thread, one end, and nothing that grows."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from kvbaton.connector import IDLE
from kvbaton.errors import LocalProtocolError, Outstanding, ThreadError
from kvbaton.segments import Segments
from kvbaton_conformance.clauses import require
from kvbaton_conformance.suite.guard.rig import D0, Rig, RigTopic, chunk, endpoint, refused

_CALLS: dict[str, list[Any]] = {
    "submit": [chunk()], "cancel": ["t"], "grant": ["t", D0, Segments.empty()], "revoke": ["t"], "forget": ["t"],
    "connect": [endpoint()], "disconnect": [D0], "fenced": [D0], "acknowledge": ["t"], "wait": [0.0], "poll": [],
    "endpoint": [], "register": [[]], "allocate": [0, "host", 0, 1], "close": [], "detach": [],
}  # fmt: skip


def elsewhere(action: Callable[[], object]) -> Exception | None:
    """What ``action`` raises in another thread."""
    raised: list[Exception] = []

    def run() -> None:
        try:
            action()
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="intruder")
    thread.start()
    thread.join(10)
    return raised[0] if raised else None


class Ownership(RigTopic):
    """T10, T11, T12: who may call, when it may be closed, and that finished transfers leave nothing."""

    @pytest.mark.clause("T11")
    @pytest.mark.parametrize("method", list(_CALLS))
    def test_every_method_has_one_thread(self, method: str) -> None:
        """Called from another one it is an error, and the plugin hears nothing."""
        rig = Rig(D0)
        before = list(rig.plugin.calls)
        error = elsewhere(lambda: getattr(rig.guard, method)(*_CALLS[method]))
        require(
            isinstance(error, ThreadError) and rig.plugin.calls == before, "T11",
            f"{method}() from a second thread was carried out", expected="ThreadError", seen=error,
        )  # fmt: skip

    @pytest.mark.clause("T11")
    def test_the_owner_may_let_go(self) -> None:
        """Figures may be read from anywhere; after detach() the next caller owns it."""
        rig = Rig(D0)
        require(elsewhere(rig.guard.statistics) is None, "T11", "statistics() is not for every thread")
        rig.guard.detach()
        require(elsewhere(rig.guard.poll) is None, "T11", "after detach() another thread cannot take it")
        refused(rig.guard.poll, ThreadError, "T11", "the old owner still calls")
        rig.guard.close()  # its owner has ended

    @pytest.mark.clause("T10", "C5.4")
    def test_close_refuses_while_a_source_may_be_read(self) -> None:
        """Then it closes, once, and everything but figures is an error afterwards."""
        rig = Rig(D0)
        posted = rig.post()
        refused(rig.guard.close, Outstanding, "T10", "it was closed under an outstanding chunk")
        require(not rig.plugin.called("close"), "C5.4", "the plugin was closed under an outstanding chunk")
        rig.plugin.complete(posted)
        rig.poll()
        rig.guard.close()
        rig.guard.close()
        require(len(rig.plugin.called("close")) == 1, "T10", "the plugin was not closed exactly once")
        refused(rig.guard.poll, LocalProtocolError, "T10", "a closed connector is polled")

    @pytest.mark.clause("T12")
    def test_nothing_grows_with_the_number_of_transfers(self) -> None:
        """500 transfers, granted, sent, received, acknowledged, forgotten."""
        rig = Rig(D0)

        def sizes() -> dict[str, int]:
            return {name: len(value) for name, value in vars(rig.guard).items() if isinstance(value, dict | set | list)}

        before = sizes()
        for _ in range(500):
            posted = rig.post()
            rig.guard.grant(posted.transfer, D0, posted.target)
            rig.plugin.complete(posted)
            rig.plugin.receive(D0, posted.transfer, 0)
            rig.poll()
            rig.guard.acknowledge(posted.transfer)
            rig.guard.forget(posted.transfer)
            rig.poll()
        grown = {name: size for name, size in sizes().items() if size > before[name]}
        require(not grown and not rig.guard.needs_polling, "T12", "the guard keeps something per transfer", seen=grown)

    @pytest.mark.clause("T7", "C6.3")
    @pytest.mark.parametrize("method", ["disconnect", "fenced", "cancel", "acknowledge", "revoke", "poll", "wait"])
    def test_no_exception_of_a_plugin_escapes(self, method: str) -> None:
        """It becomes a fault that poll() reports, once, with its cause; deadlines go on."""
        rig = Rig(D0)
        posted = rig.post()
        rig.plugin.raises[method] = RuntimeError("broken")
        given: dict[str, list[Any]] = {"disconnect": [D0], "fenced": [D0], "wait": [1e-6], "poll": []}
        progress: Any = IDLE
        try:
            progress = getattr(rig.guard, method)(*given.get(method, [posted.transfer]))
        except Exception as error:
            require(False, "C6.3", f"an exception of the plugin escaped from {method}()", seen=error)
        if method != "poll":
            progress = rig.poll()
        found = [str(fault.__cause__) for fault in getattr(progress, "faults", ())]
        require(found == ["broken"], "C6.3", f"what {method}() raised is not reported once, with its cause", seen=found)
        require(rig.poll() is IDLE, "C6.3", "the same trouble is told again on each pass")
