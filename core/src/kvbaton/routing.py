"""Policies that choose the pair of stages for a request: the built-in ones, as ordinary hooks.

*Least loaded* is what the coordinator does where no policy answers.  :class:`PrefixAware` sends a request where the
beginning of its prompt is held already: what D holds is not transferred, what P holds is not computed.  It is an
observer like any other and uses nothing that a third party's could not.

What a stage holds is only guessed here, from what it was seen to do.  A wrong guess costs time and bytes, never
correctness: the stages alone decide what they reuse (C3.3).

It runs on the coordinator's thread, where a prompt of 131,072 tokens must not hold up everybody else's requests: a
beginning is named at *marks*, at each of its first 64 blocks and at every 16th from there on, and no call names more
than a slice of the prompt.  What a stage holds of a long prompt is so learned over the milestones that follow.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

from kvbaton.handoff.table import Milestones
from kvbaton.hooks import StageLoad, hookimpl
from kvbaton.settings import RoutingSettings

if TYPE_CHECKING:
    from kvbaton.identity import PeerId, RequestKey, TransferId
    from kvbaton.records import RequestRecord

#: After so many disappointments in a row a stage is believed to hold nothing, until it is seen to hold something.
PATIENCE: Final = 8
#: So many first blocks of a prompt are a mark each; from there on every ``_STRIDE``-th is.
_FINE: Final = 64
_STRIDE: Final = 16
#: Tokens that one call names: about a millisecond.
TOKENS_PER_CALL: Final = 32768
#: Long enough that two contents never meet by chance, nor by intent.
_DIGEST_BYTES: Final = 32
#: Loads are sums of fractions: what differs by less is equal.
_EQUAL: Final = 1e-9


def policy(settings: RoutingSettings) -> PrefixAware | None:
    """The observer behind ``routing.policy``; None where the coordinator's own choice stands."""
    if settings.policy == "least-loaded":
        return None
    return PrefixAware(imbalance=settings.imbalance, entries=settings.entries)


class PrefixAware:
    """Chooses the pair that holds most of a prompt's beginning, among those whose load is within a bound.

    ``imbalance``: by how much the load of the pair (:attr:`StageLoad.load`, P's and D's together) may exceed the least
    there is; so one hot prefix fills no stage while another has room.  Of pairs that hold equally much the least loaded
    is taken, the first of equals: where nothing is shared this is the least loaded policy.

    ``entries``: marks of prompts remembered for each stage (a block, or 16 of a long prompt's), under its name and
    epoch; the longest unused go first, and of one prompt its end.  A stage that is lost is forgotten.  It learns from
    the requests that it was asked about: P holds a prompt once it has committed it, D once it has activated it, which
    is after the import; how much they had held before (``prefix_prefill`` and ``prefix_decode`` of a record) corrects
    what was believed.

    Deterministic: equal calls, equal answers.  Threading: one thread, the coordinator's.  Memory: bounded by
    ``entries`` per stage and by the live requests.
    """

    def __init__(self, *, imbalance: float, entries: int) -> None:
        self._imbalance = imbalance
        self._entries = entries
        self._stages: dict[tuple[str, int], _Seen] = {}
        self._asked: dict[RequestKey, _Asked] = {}
        self._counts = {
            "chosen": 0, "prefill_tokens_expected": 0, "prefill_tokens_found": 0, "decode_tokens_expected": 0,
            "decode_tokens_found": 0,
        }  # fmt: skip

    def statistics(self) -> Mapping[str, int]:
        """Pairs chosen; prompt tokens that the chosen stages were expected to hold, and were found to; entries kept."""
        return {**self._counts, "entries": sum(len(seen) for seen in self._stages.values())}

    # asked last: who has a policy of his own has it for what it answers
    @hookimpl(trylast=True)
    def kvbaton_choose_pair(
        self,
        request: RequestKey,
        prompt: Sequence[int],
        prefill: Sequence[StageLoad],
        decode: Sequence[StageLoad],
        pairs: Sequence[tuple[str, str]],
    ) -> tuple[str, str]:
        size = decode[0].block_tokens
        asked = self._asked.get(request)
        if asked is None or asked.prompt is not prompt:
            asked = self._asked[request] = _Asked(prompt, size)
        asked.advance(prompt)
        stages = {stage.name: stage for stage in (*prefill, *decode)}
        held = {stage.name: self._seen(stage).believed(asked) for stage in stages.values()}
        loads = {(p, d): stages[p].load + stages[d].load for p, d in pairs}
        bound = min(loads.values()) + self._imbalance + _EQUAL
        within = [pair for pair in pairs if loads[pair] <= bound]
        # max and min take the first of equals
        chosen = max(within, key=lambda pair: (held[pair[0]] + held[pair[1]], -loads[pair]))
        asked.expected = {(name, stages[name].epoch): held[name] for name in chosen}
        self._counts["chosen"] += 1
        self._counts["prefill_tokens_expected"] += held[chosen[0]] * size
        self._counts["decode_tokens_expected"] += held[chosen[1]] * size
        return chosen

    @hookimpl
    def kvbaton_milestone(
        self, transfer: TransferId, request: RequestKey, peer: PeerId | None, milestone: str, prefix: int
    ) -> None:
        asked = self._asked.get(request)
        if asked is None:
            return
        asked.advance(asked.prompt)
        seen = self._stages.get((peer.name, peer.epoch)) if peer else None
        if seen is None or peer is None:
            return
        if milestone == Milestones.RESERVED:
            self._counts["decode_tokens_found"] += prefix
            seen.correct(asked, asked.expected.get((peer.name, peer.epoch), 0), prefix // asked.block_tokens)
        elif milestone == Milestones.COMMITTED:
            self._counts["prefill_tokens_found"] += prefix
            seen.correct(asked, asked.expected.get((peer.name, peer.epoch), 0), prefix // asked.block_tokens)
            asked.teach(seen)
        elif milestone == Milestones.ACTIVATED:
            asked.teach(seen)
            asked.decodes_on = (peer.name, peer.epoch)

    @hookimpl
    def kvbaton_request_finished(self, record: RequestRecord) -> None:
        asked = self._asked.pop(record.request_id, None)
        if asked is None or asked.decodes_on is None or not record.token_ids:
            return
        seen = self._stages.get(asked.decodes_on)
        if seen is not None:
            # what was generated is a beginning, too, of what a conversation goes on with; the last token has no KV
            asked.advance((*asked.prompt[: record.prompt_tokens], *record.token_ids[:-1]))
            seen.learn(asked.names)

    @hookimpl
    def kvbaton_peer_lost(self, peer: PeerId) -> None:
        self._stages.pop((peer.name, peer.epoch), None)

    @hookimpl
    def kvbaton_peer_fenced(self, peer: PeerId) -> None:
        """One that was stopped in peace was never lost."""
        self._stages.pop((peer.name, peer.epoch), None)

    def _seen(self, stage: StageLoad) -> _Seen:
        """Made for a candidate only, which is up: what is said late about a stage that is gone makes no record."""
        key = stage.name, stage.epoch
        if key not in self._stages:
            self._stages[key] = _Seen(self._entries)
        return self._stages[key]


def _covered(marks: int) -> int:
    """Blocks up to a prompt's mark with this number, from 1; 0: none."""
    return marks if marks <= _FINE else _FINE + (marks - _FINE) * _STRIDE


@dataclass(slots=True, eq=False)
class _Asked:
    """A live request: its prompt, the names of its marks as far as they are known, and what was expected."""

    prompt: Sequence[int]
    block_tokens: int
    #: A name says all tokens up to its mark: it is a hash of the name before and of the tokens since.
    names: list[bytes] = field(default_factory=list)
    #: Blocks that the chosen stages were expected to hold.
    expected: Mapping[tuple[str, int], int] = field(default_factory=dict)
    decodes_on: tuple[str, int] | None = None
    #: Hold the whole prompt, and learn what of it is named from now on.
    _learners: list[_Seen] = field(default_factory=list)

    def advance(self, tokens: Sequence[int]) -> None:
        """Name further marks of ``tokens``, which begin as they have been so far: a bounded part of them."""
        size, count = self.block_tokens, len(self.names)
        first = _covered(count)
        past = min(len(tokens) // size, max(first + TOKENS_PER_CALL // size, _covered(count + 1)))
        if past < _covered(count + 1):
            return
        data = memoryview(array("q", tokens[first * size : past * size])).cast("B")
        block_bytes = size * 8
        begin = first
        while (end := _covered(len(self.names) + 1)) <= past:
            name = blake2b(self.names[-1] if self.names else b"", digest_size=_DIGEST_BYTES)
            name.update(data[(begin - first) * block_bytes : (end - first) * block_bytes])
            self.names.append(name.digest())
            begin = end
        for seen in self._learners:
            seen.learn(self.names)

    def teach(self, seen: _Seen) -> None:
        """``seen`` holds the whole prompt."""
        seen.learn(self.names)
        if seen not in self._learners:
            self._learners.append(seen)


class _Seen:
    """What one life of one stage is believed to hold: names of marks, the longest unused first."""

    __slots__ = ("_disappointed", "_entries", "_names")

    def __init__(self, entries: int) -> None:
        self._entries = entries
        self._names: OrderedDict[bytes, None] = OrderedDict()
        self._disappointed = 0

    def __len__(self) -> int:
        return len(self._names)

    def believed(self, asked: _Asked) -> int:
        """Leading blocks of the prompt."""
        return 0 if self._disappointed >= PATIENCE else _covered(self._known(asked))

    def learn(self, names: Sequence[bytes]) -> None:
        for name in reversed(names[: self._entries]):  # the beginning is the last to go: the rest is nothing without it
            self._names[name] = None
            self._names.move_to_end(name)
        while len(self._names) > self._entries:
            self._names.popitem(last=False)

    def correct(self, asked: _Asked, expected: int, found: int) -> None:
        """The stage has said how many leading blocks it held, when ``expected`` were believed."""
        if found:
            self._disappointed = 0
        elif expected:
            self._disappointed += 1
        known = self._known(asked)
        held = 0
        while held < len(asked.names) and _covered(held + 1) <= found:
            held += 1
        for name in asked.names[held:known]:
            del self._names[name]
        self.learn(asked.names[:held])

    def _known(self, asked: _Asked) -> int:
        """Leading marks of the prompt."""
        for count, name in enumerate(asked.names):
            if name not in self._names:
                return count
        return len(asked.names)
