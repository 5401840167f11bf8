"""What a run says at its end: the tables, the comparison, the JSON object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ByteSize
from rich.console import Console
from rich.table import Table

from kvbaton.cli.prompts import Prompt
from kvbaton.records import RequestRecord

#: Requests side by side in one table of milestones, at most.
_ACROSS = 6
#: Columns between two columns, of a time such as ``12345.6``, and of a request's id in a head at most.
_GAP, _TIME, _LONGEST_ID = 1, 7, 16
_MILESTONES = "ms since the request"

#: The milestones of a transfer in the order in which one without trouble reaches them.
_LIFE = (
    "placed", "reserved", "prefill_started", "source_ready", "submitted", "committed", "handle_done", "received",
    "acknowledged", "source_retired", "imported", "activated", "first_token", "finished", "destination_retired",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Answer:
    """One request, finished: the prompt, the runtime's record of it, and the text."""

    prompt: Prompt
    record: RequestRecord
    text: str

    @property
    def failed(self) -> bool:
        return self.record.finish_reason == "failed"


def differences(answers: Sequence[Answer], colocated: Sequence[RequestRecord]) -> list[str]:
    """One line per request whose token ids, exit depths or finish reason differ from the undisaggregated run's (A1)."""
    found = []
    for answer, other in zip(answers, colocated, strict=True):
        ours = answer.record
        name = f"request {answer.prompt.id}"
        for what, ones in (("token", "token_ids"), ("exit depth", "exit_depths")):
            here, there = tuple(getattr(ours, ones)), tuple(getattr(other, ones))
            if here != there:
                found.append(f"{name}: {_first_difference(what, here, there)}")
                break
        else:
            if ours.finish_reason != other.finish_reason:
                found.append(f"{name}: finish reason {ours.finish_reason} here, {other.finish_reason} undisaggregated")
    return found


def _first_difference(what: str, here: Sequence[int], there: Sequence[int]) -> str:
    for position, (a, b) in enumerate(zip(here, there, strict=False)):
        if a != b:
            return f"{what} {position} is {a} here, {b} undisaggregated"
    return f"{len(here)} {what}s here, {len(there)} undisaggregated"


def verdict(count: int, differing: Sequence[str]) -> str:
    """The last line of ``--compare``."""
    if not differing:
        subject = f"all {count} requests" if count != 1 else "the request"
        return f"equal: the tokens of {subject} equal the undisaggregated run's"
    return f"unequal: {len(differing)} of {count} requests differ from the undisaggregated run"


def as_json(answers: Sequence[Answer], equal: bool | None) -> dict[str, Any]:
    """The one object of ``--json``; ``equal`` only with ``--compare``."""
    result: dict[str, Any] = {"requests": [_one(answer) for answer in answers]}
    if equal is not None:
        result["equal"] = equal
    return result


def _one(answer: Answer) -> dict[str, Any]:
    record = answer.record
    return {
        "id": answer.prompt.id,
        "prompt": answer.prompt.text,
        "text": answer.text,
        "prompt_tokens": record.prompt_tokens,
        "token_ids": list(record.token_ids),
        "exit_depths": list(record.exit_depths),
        "finish_reason": record.finish_reason,
        "requeued": record.requeued,
        "error": str(record.error) if record.error is not None else None,
        "chunks": record.chunks,
        "segments": record.segments,
        "bytes": record.bytes,
        "prefix": {"prefill": record.prefix_prefill, "decode": record.prefix_decode},
        "prefill": record.prefill,
        "decode": record.decode,
        "milestones": dict(record.milestones),
    }


def print_tables(console: Console, answers: Sequence[Answer]) -> None:
    """What each request took, and when it reached each milestone; readable from 80 columns on."""
    table = _table("request")
    for name in ("prompt", "cached P/D", "tokens", "chunks", "segments", "bytes"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("P → D", no_wrap=True)
    table.add_column("end")
    for answer in answers:
        record = answer.record
        size = ByteSize(record.bytes).human_readable(separator=" ")
        table.add_row(
            answer.prompt.id, str(record.prompt_tokens), f"{record.prefix_prefill}/{record.prefix_decode}",
            str(len(record.token_ids)), str(record.chunks), str(record.segments), size,
            f"{_number(record.prefill)} → {_number(record.decode)}", _end(record),
        )  # fmt: skip
    console.print(table)
    widest = max((len(answer.prompt.id) for answer in answers), default=0)
    room = console.width - len(_MILESTONES)
    across = min(max(room // (_GAP + min(max(widest, _TIME), _LONGEST_ID)), 1), _ACROSS)
    for start in range(0, len(answers), across):
        some = answers[start : start + across]
        times = _table(_MILESTONES)
        for answer in some:
            times.add_column(answer.prompt.id, justify="right", overflow="fold", max_width=_LONGEST_ID)
        for milestone in _in_order([answer.record.milestones for answer in some]):
            cells = (answer.record.milestones.get(milestone) for answer in some)
            times.add_row(milestone, *("" if cell is None else f"{cell * 1e3:.1f}" for cell in cells))
        if times.row_count:
            console.print()
            console.print(times)


def _end(record: RequestRecord) -> str:
    """How it ended, and how often it had to begin again (C6.5)."""
    again = f", begun {record.requeued + 1} x" if record.requeued else ""
    return f"{record.finish_reason}{again}"


def _table(first: str) -> Table:
    table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False)
    table.add_column(first, overflow="fold")
    return table


def _number(stage: str) -> str:
    """``0`` of ``prefill-0``: which of its role, since the column says the role."""
    return stage.rpartition("-")[2] or "-"


def _in_order(milestones: Sequence[Mapping[str, float]]) -> list[str]:
    """Every milestone that occurs, in the order of a hand-off's life; what that order does not know comes last."""
    names = list(dict.fromkeys(name for times in milestones for name in times))
    return sorted(names, key=lambda name: _LIFE.index(name) if name in _LIFE else len(_LIFE))
