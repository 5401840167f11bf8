"""What one run is like, drawn from its seed: sizes, limits, the transport's character, and which faults may happen."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass

from kvbaton.engine import Request, SamplingParams

#: Faults that a run may have, each with the weight of its moves against about 100 of ordinary ones.
FAULTS = {
    "abort": 1.0,  # a caller gives up
    "fail": 0.6,  # a chunk fails, with or without proof of what is quiet
    "stall": 0.4,  # a chunk is under way for long, and may come to its end late
    "echo": 0.6,  # a control message or a receipt comes a second time, at once
    "replay": 0.6,  # a control message comes again, long after
    "stop": 0.02,  # everything is to end, in the middle of it all
    "freeze": 0.25,  # a stage hangs for a while
    "crash": 0.06,  # a stage's process dies
    "lose": 0.05,  # a stage's channel breaks, and it lives on
    "drop": 0.06,  # a connection between two stages breaks
    "compute": 0.2,  # an engine fails at one request
    "refuse": 0.3,  # an engine refuses in spite of credits
    "raise": 0.2,  # the transport raises where it should not
    "expire": 0.3,  # much time passes at once
    "slow": 0.3,  # a handshake takes longer than its deadline
}


@dataclass(frozen=True)
class Scenario:
    """One run's terms.  ``faults`` names those that may happen."""

    seed: int
    requests: int = 24
    #: Requests under way at once, at most.
    crowd: int = 6
    prefills: int = 1
    decodes: int = 1
    block_tokens: int = 2
    planes: int = 1
    prefill_blocks: int = 16
    decode_blocks: int = 20
    final_slots: int = 4
    compute_slots: int = 2
    #: Prompt tokens that P computes in a step.
    step_tokens: int = 4
    prefix_caching: bool = True
    longest_prompt: int = 8
    most_tokens: int = 3
    chunk_bytes: int = 64
    chunk_segments: int = 8
    inflight_bytes: int = 1 << 20
    unreceipted_chunks: int = 4
    #: The transport queues chunks before it begins with them, and takes so many.
    queue: int = 4
    revocable: bool = False
    #: It says DONE when it has copied the source, before anything is written.
    buffering: bool = False
    #: A chunk that has failed is proven quiet.
    exact: bool = True
    #: A stage that died is started again.
    restarts: bool = True
    #: How often a request may begin again when its stage or connection is lost.
    attempts: int = 0
    #: Also one of which tokens were delivered, from these.
    recompute: bool = False
    faults: frozenset[str] = frozenset()

    @classmethod
    def draw(cls, seed: int) -> Scenario:
        """The scenario of a seed."""
        draw = random.Random(seed)
        block_tokens, planes = draw.choice((1, 2, 2, 4)), draw.choice((1, 1, 1, 2))
        longest, most = draw.choice((4, 8, 12)), draw.choice((1, 2, 4))
        largest = -(-(longest + most) // block_tokens) * planes
        profile = draw.random()
        if profile < 0.1:
            faults: frozenset[str] = frozenset()
        elif profile < 0.3:
            faults = frozenset({"abort"})
        else:
            faults = frozenset(name for name in FAULTS if draw.random() < 0.5)
        return cls(
            seed=seed,
            requests=draw.randint(12, 32),
            crowd=draw.choice((1, 2, 4, 8, 12)),
            prefills=draw.choice((1, 1, 2)),
            decodes=draw.choice((1, 1, 2)),
            block_tokens=block_tokens,
            planes=planes,
            prefill_blocks=largest * draw.choice((1, 2, 4)),
            decode_blocks=largest * draw.choice((1, 2, 4)),
            final_slots=draw.choice((1, 2, 4, 8)),
            compute_slots=draw.choice((1, 2, 4)),
            step_tokens=draw.choice((1, 2, 4, 16)),
            prefix_caching=draw.random() < 0.6,
            longest_prompt=longest,
            most_tokens=most,
            chunk_bytes=draw.choice((8, 16, 64, 1024)),
            chunk_segments=draw.choice((1, 2, 64)),
            inflight_bytes=draw.choice((4096, 4096, 1 << 20)),
            unreceipted_chunks=draw.choice((1, 2, 8)),
            queue=draw.choice((1, 2, 8)),
            revocable=draw.random() < 0.4,
            buffering=draw.random() < 0.3,
            exact=draw.random() < 0.6,
            restarts=draw.random() < 0.8,
            attempts=draw.choice((0, 1, 3, 3)),
            recompute=draw.random() < 0.5,
            faults=faults,
        )

    def request(self, index: int) -> Request:
        """The request with this number: some share their beginnings."""
        draw = random.Random(self.seed * 1_000_003 + index)
        length = draw.randint(1, self.longest_prompt)
        family = draw.randint(1, 3)
        shared = draw.randint(0, length)
        prompt = [family * 100 + i for i in range(shared)] + [1000 + draw.randrange(50) for _ in range(length - shared)]
        return Request(tuple(prompt), SamplingParams(max_tokens=draw.randint(1, self.most_tokens)))

    def __str__(self) -> str:
        facts = asdict(self)
        facts["faults"] = ", ".join(sorted(self.faults)) or "none"
        return "\n".join(f"  {name}: {value}" for name, value in facts.items())
