"""The words between a stage's two threads by themselves; what they do is tested with whole stages."""

from __future__ import annotations

import gc
import queue
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from kvbaton.stage.engine_loop import CommandFailed, EngineFailed, Import, Query

T = "0" * 32


class Stage:
    """Has a queue, in which a word lies that leads back to it."""

    def __init__(self, make: Callable[[Stage], Any]) -> None:
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.inbox.put(make(self))

    def begin(self, transfer: str) -> bool:
        return bool(transfer)

    def answer(self, found: object) -> None:
        del found

    def raised(self) -> Exception:
        """Its traceback has this frame, which has the stage."""
        try:
            raise ValueError
        except ValueError as error:
            return error


@pytest.mark.clause("T12")
@pytest.mark.parametrize(
    "make",
    [
        lambda stage: Query(lambda engine: engine, stage.answer),
        lambda stage: Import(T, 0, stage.begin),
        lambda stage: CommandFailed(T, stage.raised()),
        lambda stage: EngineFailed(stage.raised()),
    ],
    ids=["Query", "Import", "CommandFailed", "EngineFailed"],
)
def test_a_word_that_nobody_takes_any_more_keeps_no_stage(make: Callable[[Stage], Any]) -> None:
    gone = weakref.ref(Stage(make))
    gc.collect()
    assert gone() is None
