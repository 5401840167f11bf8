"""T10: the end of a connector, and of a process that has one."""

from __future__ import annotations

import pytest

from kvbaton.connector import ConnectorContext
from kvbaton.errors import Outstanding
from kvbaton.identity import PeerId
from kvbaton_conformance import shared_memory
from kvbaton_conformance.clauses import ClauseBroken, leading_clause, require
from kvbaton_conformance.harness import LocalEnd, Pair, close_ends
from kvbaton_conformance.leaks import holdings, left_behind
from kvbaton_conformance.placement import PAIR, kind_of
from kvbaton_conformance.subject import Mode, Subject
from kvbaton_conformance.suite.topic import ConnectorTopic, Ends
from kvbaton_conformance.two_process import PeerProcess, RemoteEnd, open_remote_end

_CYCLES = 10


class Teardown(ConnectorTopic):
    """T10: ``close()`` refuses while chunks are outstanding, is idempotent, and leaves nothing; the process then exits
    with status 0 and says nothing.

    After every test of the kit, threads, processes, descriptors and shared memory are compared with before.
    """

    @pytest.mark.clause("T10")
    def test_closing_twice_is_closing_once(self, pair: Pair) -> None:
        """The plugin itself, closed again and again.

        Troubleshooting:
        - an exception: close() looks at what it has released already.
        """
        sent = pair.send(pair.rows((0, 0, 64)), pair.rows((1, 0, 64)))
        pair.pump_until(lambda: sent.received and sent.done, "T5: one chunk is received and done")
        pair.finish(sent.chunk.transfer)
        for end in (pair.source, pair.target):
            end.guard.close()
            problem = end.apply(_close_again)
            require(not problem, "T10", "a second close() failed", expected="no effect", seen=problem)

    @pytest.mark.clause("T10", "C5.4")
    def test_close_refuses_while_chunks_are_outstanding(self, pair: Pair) -> None:
        """Many chunks for a target that does not poll: while any has not completed, the plugin's own close refuses.

        Troubleshooting:
        - it goes through: memory is deregistered under a transfer. Raise ``Outstanding`` while ``outstanding()`` is
          not 0.
        """
        pair.clog(pair.target)
        rows = [pair.rows((0, 512 * number, 512)) for number in range(60)]
        transfer = pair.grant(rows[0].concat(*rows[1:]))
        sent = [pair.send(row, row, transfer=transfer, sequence=number) for number, row in enumerate(rows)]
        waiting, answer = pair.source.apply(_close_now)
        require(
            waiting == 0 or answer == "Outstanding", "T10",
            f"close() with {waiting} outstanding chunks did not refuse", expected="Outstanding", seen=answer,
            look="close()",
        )  # fmt: skip
        if answer == "closed":
            raise (
                ClauseBroken("T10", "close() went through before the last completions were collected by poll()")
                if waiting
                else ClauseBroken("T10", "outstanding() is 0 for chunks whose completion nobody has seen")
            )
        pair.unclog()
        pair.pump_until(lambda: all(one.over for one in sent if one.accepted), "T10: afterwards everything ends")

    @pytest.mark.clause("T10")
    @pytest.mark.parametrize("state", ["opened", "registered", "connecting", "connected", "peer-gone"])
    def test_a_connector_can_be_closed_in_any_state(self, ends: Ends, state: str) -> None:
        """Opened only, registered, in the middle of a handshake, connected, and after its peer has gone.

        Troubleshooting:
        - an attribute is missing: it is made by a later call than the one that failed or never came.
        """
        if state == "opened":
            ends.end("prefill-0", register=False).guard.close()
            return
        pair = ends.pair(connect=state in ("connected", "peer-gone"))
        if state == "connecting":
            pair.source.guard.connect(pair.target.guard.endpoint())
            pair.source.pump()
        if state == "peer-gone":
            ends.lose(pair.target)
        pair.source.guard.close()

    @pytest.mark.clause("T10", "T12")
    def test_opening_and_closing_leaves_nothing(self, ends: Ends) -> None:
        """Ten connectors are opened, registered and closed in one process.

        Troubleshooting:
        - a thread is not joined; a descriptor, a mapping or a shared-memory object is not closed or not unlinked.
        """
        end = ends.end("prefill-0")
        left = end.apply(_open_and_close_many, ends.subject.reference, dict(ends.subject.given_options), ends.mode)
        require(
            not left, "T10", f"{_CYCLES} connectors were opened and closed, and left something behind",
            expected="nothing new", seen="; ".join(left), look="close()",
        )  # fmt: skip

    @pytest.mark.clause("T10")
    @pytest.mark.parametrize("closes", ["closed", "not-closed"])
    def test_the_process_exits_silently(self, ends: Ends, mode: Mode, closes: str) -> None:
        """After a chunk has arrived, with and without ``close()``: exit status 0, nothing on standard error.

        Troubleshooting:
        - it does not exit: a thread that is not a daemon waits for ever; a native library joins its own at exit;
        - a traceback at exit: a destructor, or a daemon thread, runs while the interpreter is torn down;
        - a warning about shared memory: multiprocessing's resource tracker also thinks that it owns the object.
        """
        subject: Subject = ends.subject
        if mode == "in-process":
            process = PeerProcess()
            try:
                process.call("open_pair", subject.reference, dict(subject.given_options), closes, subject.devices)
            except BaseException:
                process.kill()
                raise
            problems = process.leave()
        else:
            problems = _exits_of_two(ends, subject, closes)
        for problem in problems:
            clause = leading_clause(problem) or "T10"
            require(False, clause, problem.removeprefix(f"{clause}: "), expected="exit status 0, silence")


def _exits_of_two(ends: Ends, subject: Subject, closes: str) -> list[str]:
    opened: list[RemoteEnd] = []
    try:
        for name in PAIR:
            options = dict(subject.given_options)
            opened.append(open_remote_end(ends.processes, subject, PeerId.start(name), {}, options))
        pair = Pair(opened[0], opened[1])
        pair.connect()
        sent = pair.send(pair.rows((0, 0, 64)), pair.rows((1, 0, 64)))
        pair.pump_until(lambda: sent.received and sent.done, "T5: one chunk is received and done")
        if closes == "closed":
            close_ends(opened)
    except BaseException:
        for end in opened:
            end.process.kill()
        raise
    return [problem for end in opened for problem in end.process.leave()]


def _close_again(end: LocalEnd) -> str:
    for _ in range(3):
        try:
            end.connector.close()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


def _close_now(end: LocalEnd) -> tuple[int, str]:
    """How many the plugin says are outstanding, and what its close() does; only where that must be refused."""
    waiting = end.connector.outstanding()
    if not waiting:
        return 0, "nothing was outstanding"
    try:
        end.connector.close()
    except Outstanding:
        return waiting, "Outstanding"
    except Exception as error:
        return waiting, f"{type(error).__name__}: {error}"
    return waiting, "closed"


def _open_and_close_many(end: LocalEnd, reference: object, options: dict[str, object], mode: Mode) -> list[str]:
    from kvbaton.connector import MemoryRegion, Need
    from kvbaton.plugins import choose_connector
    from kvbaton_conformance.inspector import ByteInspector
    from kvbaton_conformance.subject import Reference

    assert isinstance(reference, Reference)
    device = end.memory.device
    need = Need(kind_of(device), "same_process" if mode == "in-process" else "cross_process")
    plugin, valid = choose_connector(reference.load(), need, options)

    def once(number: int) -> None:
        connector = plugin.open(valid, ConnectorContext(PeerId.start(f"stage-{number}"), device))
        memory = ByteInspector("memory", device=device)
        if connector.capabilities.memory_origin == "allocated":
            regions: list[MemoryRegion] = [connector.allocate(0, *memory.place, 8192)]
        else:
            regions = [memory.allocate(0, 8192)]
        connector.register(regions)
        connector.metadata()
        connector.poll()
        shared_memory.notice()
        connector.close()

    once(0)
    before = holdings()
    for number in range(1, _CYCLES):
        once(number)
    return left_behind(before)
