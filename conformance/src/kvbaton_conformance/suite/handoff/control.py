"""C9: control messages are no hand-off, and a hand-off's channels tell what they lost."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest

from kvbaton import messages
from kvbaton.errors import MessageError
from kvbaton.messages import Call, Reply
from kvbaton_conformance.clauses import ClauseBroken, require
from kvbaton_conformance.deployment import Deployment
from kvbaton_conformance.subject import Subject
from kvbaton_conformance.suite.handoff import boundaries
from kvbaton_conformance.suite.handoff.failure import after_a_death
from kvbaton_conformance.suite.handoff.topic import OTHER, REQUEST, DeploymentTopic


class Control(DeploymentTopic):
    """C9: generic control disturbs no transfer, and nothing malformed does."""

    @pytest.mark.clause("C9.2", "C1.5")
    @pytest.mark.mode("in-process")
    def test_calls_are_answered_and_disturb_nothing(self, world: Deployment) -> None:
        """Statistics, health and an unknown method, under the transfer's own id, while its chunks are under way."""
        answer = world.submit("a", REQUEST)
        boundaries.posted(world)
        world.seats["prefill-0"].engine_frozen = False
        for name in world.seats:
            for method in ("statistics", "health", "dance"):
                world.resend(name, Call(f"{answer.transfer}", answer.transfer, method))
        world.settle()
        for name, seat in world.seats.items():
            replies = [
                m.message for m in world.mail
                if m.peer == seat.peer and m.way == "from" and isinstance(m.message, Reply)
            ]  # fmt: skip
            errors = [reply.error for reply in replies if reply.error]
            results = [reply.result for reply in replies if not reply.error]
            require(
                len(replies) == 3 and len(errors) == 1 and "dance" in errors[0]
                and any(result.get("healthy") is True for result in results)
                and any(result.get("engine", {}).get("blocks_used", 0) > 0 for result in results),
                "C9.2", f"{name} did not answer each call once, with a result or an error",
                expected="statistics, health, and an error that names the method", seen=replies,
            )  # fmt: skip
        world.let_go()
        world.run_until(world.idle, "C9.2: the transfer goes on")
        world.check_answer("a")
        world.finish()

    @pytest.mark.clause("C9.1", "C9.3")
    @pytest.mark.mode("in-process")
    def test_no_family_reads_another(self, world: Deployment) -> None:
        """Every message of a real hand-off, given to the decoders of the other families: none takes it."""
        world.submit("a", REQUEST)
        world.run_until(world.idle, "C4: the request ends")
        for mail in world.mail:
            data = messages.encode(messages.envelope(1, 1, mail.message))
            own = messages.family_of(mail.message)
            body = messages.decode(data).body
            require(body == mail.message, "C9.3", "a message is not what it was after the wire", seen=body)
            for family in get_args(messages.Family):
                if family == own:
                    continue
                try:
                    messages.decode_body(family, msgspec.msgpack.encode(mail.message))
                except MessageError:
                    continue
                raise ClauseBroken(
                    "C9.1", f"a {type(mail.message).__name__} was read as a message of the {family} family"
                )
        world.check_answer("a")
        world.finish()

    @pytest.mark.clause("C9.3")
    @pytest.mark.mode("in-process")
    def test_rubbish_on_a_channel_is_dropped_and_counted(self, world: Deployment) -> None:
        """Malformed, truncated and oversized bytes arrive between the messages of a hand-off."""
        world.submit("a", REQUEST)
        boundaries.reserved(world)
        good = messages.encode(messages.envelope(1, 1, messages.Cancel(world.answers["a"].transfer)))
        rubbish = (b"", b"\x00", b"\xff" * 100, good[:-1], good + b"\x00", b"\x91" * 5000)
        for seat in world.seats.values():
            for data in rubbish:
                seat.stage.channel.accept(data)  # type: ignore[attr-defined]
        world.settle()
        for seat in world.seats.values():
            dropped = seat.stage.channel.statistics().dropped
            require(
                sum(dropped.values()) == len(rubbish) and not seat.stage.ended, "C9.3",
                f"{seat.peer.name} did not drop and count what is no message", expected=len(rubbish), seen=dropped,
            )  # fmt: skip
        world.let_go()
        world.run_until(world.idle, "C9.3: the transfer goes on")
        world.check_answer("a")
        world.finish()

    @pytest.mark.clause("C9.4", "C6.4")
    @pytest.mark.mode("in-process")
    def test_a_gap_in_a_channel_loses_the_peer(self, world: Deployment, subject: Subject) -> None:
        """One message of P's is missing: P is lost, and its transfer does not wait for ever."""
        answer = world.submit("a", REQUEST)
        boundaries.committed(world)
        channel = world.seats["prefill-0"].stage.channel
        channel._outbound._seq += 1  # type: ignore[attr-defined]
        world.repeat("prefill-0", messages.Progress(answer.transfer, 1))
        world.run_until(lambda: bool(world.kills), "C9.4: a gap means that the peer is lost")
        require(
            world.kills[0].name == "prefill-0" and answer.ended and "C9.4" in answer.ending.cause, "C9.4",
            "a lost message was not noticed", expected="prefill-0 is lost, by C9.4", seen=f"{world.kills}, {answer}",
        )  # fmt: skip
        after_a_death(world, subject)

    @pytest.mark.clause("C9.4", "C7.1")
    @pytest.mark.mode("in-process")
    def test_bytes_that_come_again_are_dropped(self, world: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
        """The carrier of D's channel delivers every message twice, with its number."""
        channel = world.seats["decode-0"].stage.channel
        accept = channel.accept  # type: ignore[attr-defined]

        def twice(item: bytes) -> None:
            accept(item)
            accept(item)

        with monkeypatch.context() as patched:
            patched.setattr(channel, "accept", twice)
            world.submit("a", REQUEST)
            world.submit("b", OTHER)
            world.run_until(world.idle, "C9.4: repeats are dropped, and both requests end")
        dropped = {reason: count for (_, reason), count in channel.statistics().dropped.items()}
        require(dropped.get("repeat", 0) >= 4, "C9.4", "repeats were not recognised by their number", seen=dropped)
        for key in "ab":
            world.check_answer(key)
        world.finish()
