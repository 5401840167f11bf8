"""T11: one thread."""

from __future__ import annotations

import threading

import pytest

from kvbaton.errors import ThreadError
from kvbaton_conformance.clauses import require
from kvbaton_conformance.harness import LocalEnd, Pair
from kvbaton_conformance.suite.topic import ConnectorTopic


class Threads(ConnectorTopic):
    """T11: all calls come from one thread; another one is refused before the plugin notices."""

    @pytest.mark.clause("T11")
    def test_a_call_from_another_thread_is_refused(self, pair: Pair) -> None:
        """Every method, from a thread that does not own the connector."""
        for end in (pair.source, pair.target):
            before = end.testimony().calls
            accepted = end.apply(_calls_from_another_thread)
            require(
                not accepted, "T11", "calls from another thread were accepted", expected="ThreadError", seen=accepted
            )
            after = end.testimony().calls
            require(
                before == after, "T11", "a call from another thread reached the plugin", expected=before, seen=after
            )

    @pytest.mark.clause("T11")
    def test_a_new_owner_can_take_over(self, pair: Pair) -> None:
        """A connector that was let go of belongs to the next thread that calls, and works there.

        Troubleshooting:
        - it fails there: state was kept in thread-local variables, or an event loop belongs to the first thread.
        """
        sent = pair.send(pair.rows((0, 0, 64)), pair.rows((1, 0, 64)))
        problem = pair.source.apply(_polls_elsewhere)
        require(not problem, "T11", "a connector does not work in the thread that took it over", seen=problem)
        pair.pump_until(lambda: sent.received, "T11: a chunk arrives all the same")


def _calls_from_another_thread(end: LocalEnd) -> list[str]:
    guard, peer = end.guard, end.peer
    calls = {
        "poll": guard.poll,
        "wait": lambda: guard.wait(0.0),
        "endpoint": guard.endpoint,
        "disconnect": lambda: guard.disconnect(peer),
        "cancel": lambda: guard.cancel("0" * 32),  # type: ignore[arg-type]
        "close": guard.close,
    }
    accepted: list[str] = []

    def run() -> None:
        for name, call in calls.items():
            try:
                call()
            except ThreadError:
                continue
            accepted.append(name)

    _join(run)
    return accepted


def _polls_elsewhere(end: LocalEnd) -> str:
    problems: list[str] = []

    def run() -> None:
        try:
            for _ in range(5):
                end.pump()
            end.guard.detach()
        except Exception as error:
            problems.append(f"{type(error).__name__}: {error}")

    end.guard.detach()
    _join(run)
    return "; ".join(problems)


def _join(run: object) -> None:
    assert callable(run)
    thread = threading.Thread(target=run, name="kvbaton-conformance-other-thread", daemon=True)
    thread.start()
    thread.join(10.0)
    require(not thread.is_alive(), "T7", "a call from another thread did not return within 10 s")
