"""Stages over any connector that hold one request at a named point of its hand-off, until a test lets it go.

The engine is scripted, the connector stands behind a :class:`~kvbaton_conformance.gate.Gate`; both are plugins, so
that stages in processes of their own are reached by name: ``engine.name = "kvbaton_conformance.halt:engine"`` and
``transport.name = "kvbaton_conformance.halt:connector"``.  Only a request whose prompt begins with :data:`MARK` is
held; every other one passes.

Stage and test speak through a folder: the stage makes a file named after the point once the request is there, and holds
it until there is a file ``go``.  A held engine is a model step that takes long: its thread computes nothing else, while
the pump goes on.

On :data:`SEIZE` a stage hangs as under a library that never gives the interpreter back: nothing of Python runs in it,
neither its engine nor its pump, and its process lives, so that ZeroMQ's own thread answers heartbeats.
"""

from __future__ import annotations

import ctypes
import enum
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, cast

from pydantic import BaseModel, ConfigDict

from kvbaton.connector import (
    API_VERSION,
    Availability,
    Chunk,
    ConnectorContext,
    Need,
    Progress,
    TransferConnector,
)
from kvbaton.engine import Admission, Role, StepOutput
from kvbaton.identity import TransferId
from kvbaton_conformance import shared_memory
from kvbaton_conformance.gate import Gate
from kvbaton_conformance.scripted import ScriptedEngine
from kvbaton_conformance.scripted_plugin import ScriptedOptions, ScriptedPlugin

#: The first token of a prompt that is held.
MARK = 49_999
#: The first token of a prompt that ends the process of its prefill stage, with :data:`STATUS` after :data:`LAST_WORDS`.
DIE = 49_998
LAST_WORDS = "the device has fallen off the bus"
STATUS = 3
GO = "go"
#: Makes a stage seize its interpreter; it makes a file named so and after its process before.
SEIZE = signal.SIGUSR1
SEIZED = "seized-"
#: Seconds after which a held request goes on although nobody said so: a test that died must not leave processes behind.
PATIENCE = 60.0
_LOOK_INTERVAL = 0.002


class Point(enum.Enum):
    """Where a marked request is held, in the order of its life."""

    #: D was asked to reserve and has not answered; P knows nothing.
    BEFORE_RESERVE = "before-reserve"
    #: D has reserved; P was told to prefill and holds nothing yet.
    RESERVED = "reserved"
    #: P holds memory and computes its first range; nothing is posted.
    COMPUTING = "computing"
    #: Chunks of the first range are posted: P sees no completion and D no receipt of them; the rest is not computed.
    POSTED = "chunks-posted"
    #: All chunks are posted and committed; P sees no completion, D no receipt.
    COMMITTED = "committed"
    #: D has received everything and not imported it; P has no completion, so its memory is not quiet.
    RECEIVED = "received"
    #: D has imported and answered with a first token; P has retired.
    DECODING = "decoding"


_COMPLETIONS_HELD = (Point.POSTED, Point.COMMITTED, Point.RECEIVED)
_RECEIPTS_HELD = (Point.POSTED, Point.COMMITTED)

#: Marked transfers of this process: its engine learns which they are, its connector needs to know.
_marked: set[TransferId] = set()


class _Place:
    """The folder through which stage and test speak."""

    def __init__(self, folder: str, point: Point) -> None:
        self.point = point
        self._folder = Path(folder)
        self._gone = False

    @property
    def gone(self) -> bool:
        """Whether the test has let the request go; final."""
        self._gone = self._gone or (self._folder / GO).exists()
        return self._gone

    def reached(self) -> None:
        (self._folder / self.point.value).touch()

    def hold(self, announce: bool = True) -> None:
        """Hold the calling thread."""
        if announce:
            self.reached()
        give_up = time.monotonic() + PATIENCE
        while not self.gone and time.monotonic() < give_up:
            time.sleep(_LOOK_INTERVAL)


def _seize_on_signal(folder: Path) -> None:
    def seize(_number: int, _frame: FrameType | None) -> None:
        (folder / f"{SEIZED}{os.getpid()}").touch()
        ctypes.PyDLL(None).sleep(int(PATIENCE))  # a call that keeps the interpreter's lock

    if threading.current_thread() is threading.main_thread():  # else it is a thread of somebody's process
        signal.signal(SEIZE, seize)


class HaltingEngine(ScriptedEngine):
    """A scripted engine whose thread is held with a marked request."""

    place: _Place

    def reserve_transfer(self, admission: Admission) -> None:
        if admission.request.prompt[0] == DIE and self.role is Role.PREFILL:
            print(LAST_WORDS, file=sys.stderr, flush=True)
            os._exit(STATUS)
        if admission.request.prompt[0] == MARK:
            _marked.add(admission.transfer)
            here = Point.BEFORE_RESERVE if self.role is Role.DECODE else Point.RESERVED
            if self.place.point is here:
                self.place.hold()
        super().reserve_transfer(admission)

    def accept_import(self, transfer: TransferId, valid: int) -> None:
        if transfer in _marked and self.place.point is Point.RECEIVED:
            self.place.hold()
        super().accept_import(transfer, valid)

    def step(self) -> Sequence[StepOutput]:
        for transfer in _marked.intersection(self._queue):
            sequence = self._sequences[transfer]
            if self.role is Role.PREFILL:
                if self.place.point is Point.COMPUTING:
                    self.place.hold()
                elif self.place.point is Point.POSTED and sequence.reported:
                    self.place.hold(announce=False)  # the connector says so, once it has a chunk
            elif self.place.point is Point.DECODING and sequence.tokens:
                self.place.hold()
        return super().step()

    def release_transfer(self, transfer: TransferId) -> None:
        _marked.discard(transfer)
        super().release_transfer(transfer)


class HaltingOptions(ScriptedOptions):
    """``folder`` and ``point``: see the module's text."""

    folder: str
    point: Point


class HaltingPlugin(ScriptedPlugin):
    """An :class:`~kvbaton.engine.EnginePlugin`."""

    name = "halting"
    Options = HaltingOptions
    Engine = HaltingEngine

    def open(self, model: str, options: ScriptedOptions, role: Role, device: int | None) -> ScriptedEngine:
        opened = super().open(model, options, role, device)
        assert isinstance(opened, HaltingEngine)
        assert isinstance(options, HaltingOptions)
        opened.place = _Place(options.folder, options.point)
        _seize_on_signal(Path(options.folder))
        return opened


class _Halting(Gate):
    """A connector that reports nothing of marked transfers while they are held."""

    def __init__(self, connector: TransferConnector, place: _Place) -> None:
        super().__init__(connector)
        self.of = _marked.__contains__
        self._place = place
        if place.point in _COMPLETIONS_HELD:
            self.hold("completions")
        if place.point in _RECEIPTS_HELD:
            self.hold("receipts")

    def submit(self, chunk: Chunk) -> bool:
        taken = super().submit(chunk)
        if taken and self._place.point is Point.POSTED and chunk.transfer in _marked:
            self._place.reached()
        return taken

    def poll(self) -> Progress:
        shared_memory.notice_now_and_then()
        if self._held and self._place.gone:
            self.let_go()
        return super().poll()


class HaltingConnectorOptions(BaseModel):
    """``named`` with its ``options`` is the connector; ``folder`` and ``point``: see the module's text."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    named: str
    options: dict[str, Any] = {}
    folder: str
    point: Point


class HaltingConnectorPlugin:
    """A :class:`~kvbaton.connector.ConnectorPlugin`.  Usable wherever it is asked: whoever names it has probed."""

    name = "halting"
    api_version = API_VERSION
    Options = HaltingConnectorOptions

    def probe(self, need: Need) -> Availability:
        return Availability(True)

    def open(self, options: HaltingConnectorOptions, context: ConnectorContext) -> TransferConnector:
        from kvbaton.plugins import choose_connector

        need = Need("host" if context.device is None else "cuda", "cross_process")
        plugin, valid = choose_connector(options.named, need, dict(options.options))
        place = _Place(options.folder, options.point)
        shared_memory.join()  # what a killed stage leaves behind is known
        return cast("TransferConnector", _Halting(plugin.open(valid, context), place))


engine = HaltingPlugin()
connector = HaltingConnectorPlugin()
