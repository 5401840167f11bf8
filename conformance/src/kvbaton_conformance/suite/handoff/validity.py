"""C3: which bytes travel."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from kvbaton import messages
from kvbaton.connector import Chunk
from kvbaton.engine import Request, Role, SamplingParams
from kvbaton.errors import SegmentError
from kvbaton.handoff import effects as fx
from kvbaton.handoff.table import DestinationPhase
from kvbaton.identity import TransferId
from kvbaton.segments import Segments
from kvbaton_conformance.clauses import require
from kvbaton_conformance.deployment import Deployment
from kvbaton_conformance.scripted import ScriptedLayout, ScriptedModel
from kvbaton_conformance.subject import Subject
from kvbaton_conformance.suite.handoff import boundaries
from kvbaton_conformance.suite.handoff.topic import OTHER, REQUEST, DeploymentTopic, OpenDeployment, request


class Validity(DeploymentTopic):
    """C3: every valid byte that D lacks arrives, once, in its place; nothing else is written."""

    @pytest.mark.clause("C3.1", "C3.2", "T3")
    @pytest.mark.mode("in-process")
    @pytest.mark.parametrize("length", [1, 4, 30, 33])
    def test_the_prompts_bytes_arrive_and_no_others(self, world: Deployment, length: int) -> None:
        """D stands still when it has received: its whole memory is compared byte by byte.

        Troubleshooting:
        - bytes beyond the prompt in its last block: the unused tail was sent;
        - bytes between blocks: a segment is longer than its component, or strides are mixed up;
        - right bytes in wrong places: source and destination segments are not paired by index.
        """
        answer = world.submit("a", request(7, length))
        boundaries.received(world)
        engine = world.seats["decode-0"].engine
        wanted = engine.expected_prompt(answer.request.prompt, engine.tables(answer.transfer))
        wrong = np.flatnonzero(wanted != engine.memory)
        require(
            not len(wrong), "C3.1", f"{len(wrong)} bytes of D's memory are not what they must be after the hand-off",
            expected="the prompt's KV in its blocks and nothing anywhere else", seen=_places(engine.memory, wanted),
            look="the ends of segments; which segment goes where; partial blocks",
        )  # fmt: skip
        world.let_go()
        world.run_until(world.idle, "C3.1: the request ends")
        world.check_answer("a")
        world.finish()

    @pytest.mark.clause("C3.2", "C3.6")
    @pytest.mark.mode("in-process")
    def test_each_byte_is_written_once_and_within_limits(
        self, open_deployment: OpenDeployment, subject: Subject
    ) -> None:
        """Four planes and chunks of at most three segments: no byte twice, none missing, no chunk too large."""
        segments = min(3, subject.capabilities.max_segments)
        world = open_deployment(
            stepped=True, model=ScriptedModel(planes=4), narrow={"max_segments": segments},
            layouts={
                Role.PREFILL: ScriptedLayout(blocks=128), Role.DECODE: ScriptedLayout(blocks=120, gap=3)
            },
        )  # fmt: skip
        answer = world.submit("a", REQUEST)
        world.run_until(world.idle, "C3.2: the request ends")
        chunks = list(world.seats["prefill-0"].gate.submitted)
        targets = Segments.empty().concat(*(chunk.target for chunk in chunks))
        model = world.model
        wanted = model.planes * sum(model.token_bytes) * len(answer.request.prompt) + model.final_bytes
        require(
            targets.disjoint() and targets.nbytes == wanted, "C3.2", "the chunks do not cover what must travel once",
            expected=f"{wanted} bytes, each once", seen=f"{targets.nbytes} bytes, disjoint: {targets.disjoint()}",
        )  # fmt: skip
        largest = max(chunk.nbytes for chunk in chunks), max(len(chunk.source) for chunk in chunks)
        limit = int(world.settings.transfer.chunk_bytes), segments
        require(
            largest[0] <= limit[0] and largest[1] <= limit[1], "C3.6", "a chunk is larger than the transport takes",
            expected=f"at most {limit} (bytes, segments)", seen=largest,
        )  # fmt: skip
        world.check_answer("a")
        world.finish()

    @pytest.mark.clause("C3.3", "C3.4")
    @pytest.mark.mode("in-process")
    def test_prefixes_that_differ(self, open_deployment: OpenDeployment) -> None:
        """D knows more than P, less, all, and nothing: what D lacks is sent, from P's cache where need be.

        Troubleshooting:
        - tokens differ when P had a prefix that D had not: cached blocks of P are never reported;
        - more bytes than needed: D's valid prefix is sent again, over memory that other requests read.
        """
        world = open_deployment(stepped=True)
        p, d = (world.seats[name] for name in ("prefill-0", "decode-0"))
        token = world.model.planes * sum(world.model.token_bytes)
        first = Request(tuple(range(16)), SamplingParams(max_tokens=2))
        longer = Request((*range(16), *range(50, 61)), SamplingParams(max_tokens=4))

        def sent(key: str, what: Request) -> int:
            before = p.guard.statistics()["bytes_total"]
            world.submit(key, what)
            world.run_until(world.idle, f"C3.3: request {key} ends")
            world.check_answer(key)
            return int(p.guard.statistics()["bytes_total"] - before) - world.model.final_bytes

        for key, what, forgets, wanted in (
            ("cold", first, (), 16), ("full hit on both", first, (), 0), ("only P knows it", first, (d,), 16),
            ("only D knows it", first, (p,), 0), ("both know a part", longer, (), 11),
            ("P knows a part, D nothing", longer, (d,), 27),
        ):  # fmt: skip
            for seat in forgets:
                seat.engine.forget_prefixes()
            tokens, rest = divmod(sent(key, what), token)
            require(
                (tokens, rest) == (wanted, 0), "C3.3", f"not exactly what D lacks was sent ({key})",
                expected=f"KV of {wanted} tokens", seen=f"of {tokens} and {rest} bytes",
            )  # fmt: skip
        world.finish()

    @pytest.mark.clause("C3.4")
    @pytest.mark.mode("in-process")
    @pytest.mark.parametrize("final_bytes", [24, 0], ids=["final-payload", "no-final-payload"])
    def test_a_full_hit_still_ends(self, open_deployment: OpenDeployment, final_bytes: int) -> None:
        """Nothing of the KV is to be sent; the final payload is, and where it is empty, an empty chunk.

        Troubleshooting:
        - it never ends: a chunk of 0 bytes completes without a receipt, or is not sent at all.
        """
        world = open_deployment(stepped=True, model=ScriptedModel(planes=2, final_bytes=final_bytes))
        what = Request(tuple(range(16)), SamplingParams(max_tokens=3))
        for key in ("cold", "hit"):
            world.submit(key, what)
            world.run_until(
                world.idle, f"C3.4: a prompt that is {key} is handed over, with {final_bytes} bytes of final payload"
            )
            world.check_answer(key)
        last = world.seats["prefill-0"].gate.submitted[-1]
        require(
            (last.sequence, last.nbytes) == (0, world.model.final_bytes), "C3.4",
            "a full hit does not send exactly one chunk with the final payload",
            expected=f"chunk 0 of {world.model.final_bytes} bytes", seen=f"chunk {last.sequence}, {last.nbytes} bytes",
        )  # fmt: skip
        world.finish()

    @pytest.mark.clause("C3.5", "T2")
    @pytest.mark.mode("in-process")
    def test_stages_that_mean_different_things_are_not_connected(self, open_deployment: OpenDeployment) -> None:
        """D's cache has other bytes per token: both sides refuse, and name the field and both values."""
        ours = ScriptedModel(planes=2)
        theirs = ScriptedModel(planes=2, token_bytes=(16, 16, 12, 24))
        world = open_deployment(model=ours, models={Role.PREFILL: ours, Role.DECODE: theirs}, connected=False)
        world.run_until(lambda: len(world.letters(messages.PeerDown)) == 2, "C3.5: both sides refuse the connection")
        for word in world.letters(messages.PeerDown):
            require(
                word.cause.startswith("C3.5") and "token_bytes" in word.cause and "12" in word.cause
                and "24" in word.cause, "C3.5", "a geometry mismatch is not explained",
                expected="the field token_bytes with 12 and 24", seen=word.cause,
            )  # fmt: skip
        peers = [peer for seat in world.seats.values() for peer in seat.gate.called("connect")]
        require(not peers, "C3.5", "a connection was made before the geometries were compared", seen=peers)
        require(
            not world.coordinator.connected(world.seats["prefill-0"].peer, world.seats["decode-0"].peer), "C3.5",
            "stages of different geometry count as connected",
        )  # fmt: skip
        world.close()

    @pytest.mark.clause("C3.6", "C6.3")
    @pytest.mark.mode("in-process")
    def test_a_range_outside_of_memory_moves_nothing(self, world: Deployment) -> None:
        """P's engine reports blocks that do not exist: that request fails and says why; the others go on."""
        bad = world.submit("bad", REQUEST)
        world.submit("good", OTHER)
        world.seats["prefill-0"].engine.fail_range.add(bad.transfer)
        world.run_until(world.idle, "C3.6: both requests end")
        require(
            bad.ending.ending is fx.Ending.FAILED and "C3.6" in bad.ending.cause, "C3.6",
            "a range outside of registered memory is not refused", expected="failed, by C3.6", seen=bad.ending,
        )  # fmt: skip
        chunks = [chunk for chunk in world.seats["prefill-0"].gate.submitted if chunk.transfer == bad.transfer]
        require(not chunks, "C3.6", "chunks with segments outside of registered memory were sent", seen=chunks)
        world.check_answer("good")
        world.finish()

    @pytest.mark.clause("C3.6")
    @pytest.mark.mode("in-process")
    def test_a_segment_outside_of_its_region_is_refused_at_submit(self, world: Deployment) -> None:
        """The guard over this connector, asked for one byte too many on either side: refused, and no byte moves."""
        p, d = (world.seats[name] for name in ("prefill-0", "decode-0"))
        end_of = [seat.guard.endpoint().regions[0].length for seat in (p, d)]
        grain = p.guard.capabilities.alignment
        for at in ((end_of[0], 0), (0, end_of[1])):
            reads, writes = (Segments.of([(0, offset, grain)]) for offset in at)
            chunk = Chunk(TransferId("0" * 32), 0, d.peer, reads, writes, grain)
            try:
                p.guard.submit(chunk)
            except SegmentError:
                continue
            require(False, "C3.6", "a segment outside of its region was accepted", seen=f"{reads} to {writes}")
        require(not p.gate.submitted, "C3.6", "the transport saw a chunk that was refused", seen=p.gate.submitted)
        world.finish()

    @pytest.mark.clause("C3.3", "C8.3")
    @pytest.mark.mode("in-process")
    def test_a_prefix_is_valid_only_after_its_import(self, world: Deployment) -> None:
        """The same prompt twice: the second is reserved while the first is on its way, and must not count on it."""
        world.submit("a", REQUEST)
        boundaries.committed(world)
        second = world.submit("b", REQUEST)
        world.run_until(
            lambda: world.seats["decode-0"].phases.get(second.transfer) is DestinationPhase.RESERVED,
            "C2.1: D reserves for the second request",
        )
        valid = world.letters(messages.Reserved, second.transfer)[0].reservation.valid
        require(
            valid == 0, "C8.3", "blocks that are still being written were offered as a valid prefix",
            expected="no valid prefix before the first is imported", seen=f"{valid} tokens",
        )  # fmt: skip
        world.let_go()
        world.run_until(world.idle, "C3.3: both end")
        third = world.submit("c", REQUEST)
        world.run_until(world.idle, "C3.3: the third ends")
        valid = world.letters(messages.Reserved, third.transfer)[0].reservation.valid
        require(valid == 28, "C3.3", "an imported prefix is not used", expected="28 tokens", seen=f"{valid} tokens")
        for key in "abc":
            world.check_answer(key)
        world.finish()


def _places(found: npt.NDArray[np.uint8], wanted: npt.NDArray[np.uint8]) -> str:
    at = np.flatnonzero(found != wanted)
    return ", ".join(f"byte {int(i)} is {int(found[i]):#04x}, not {int(wanted[i]):#04x}" for i in at[:4])
