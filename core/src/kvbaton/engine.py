"""The engine protocol: what an inference engine implements and is called back through to take part in a hand-off.

The engine owns scheduler, tensors, sampling and request objects; the stage asks and is told, and never reaches into the
engine's queues or caches.  One thread, the engine thread, calls the engine, between steps, never re-entered, never
blocking on a peer.  A call about an unknown or already released transfer is a no-op (C1.2).

A prefill engine (P) computes prompt KV and the final payload and never samples (A2).  A decode engine (D) reserves
memory, imports, and from then on treats the request like any other.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol

import msgspec

from kvbaton.connector import DeviceEvent, MemoryKind, MemoryRegion
from kvbaton.errors import RequestRefused
from kvbaton.geometry import KVGeometry
from kvbaton.identity import TransferId
from kvbaton.reservation import Capacity, Reservation, Tables

#: The version of this protocol that an engine plugin states as ``api_version``.
ENGINE_API_VERSION = 1


class Role(enum.Enum):
    PREFILL = "prefill"
    DECODE = "decode"
    #: Both in one engine, without a hand-off: what ``--compare`` runs.
    COLOCATED = "colocated"


class SamplingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How D chooses tokens and when it stops.  ``temperature`` 0 is greedy; ``seed`` makes sampling repeatable."""

    max_tokens: Annotated[int, msgspec.Meta(ge=1)] = 16
    temperature: Annotated[float, msgspec.Meta(ge=0.0)] = 0.0
    top_k: Annotated[int, msgspec.Meta(ge=0)] = 0
    top_p: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] = 1.0
    seed: int = 0
    #: Generation ends after one of these (it is part of the output), besides the model's own end tokens.
    stop_token_ids: tuple[int, ...] = ()
    #: Generation ends once the text contains one of these.
    stop: tuple[Annotated[str, msgspec.Meta(min_length=1)], ...] = ()
    #: Go on past the model's own end tokens.
    ignore_eos: bool = False


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a user asks for: prompt token ids (at least one) and how to go on from them.

    The constructor takes what it is given; :meth:`check` is what every entrance calls.
    """

    prompt: Annotated[tuple[Annotated[int, msgspec.Meta(ge=0)], ...], msgspec.Meta(min_length=1)]
    sampling: SamplingParams = SamplingParams()

    def check(self) -> int:
        """Raise :class:`~kvbaton.errors.RequestRefused` unless every value is of its type, in its range, and can
        travel.

        Returns the bytes that the request takes on the wire.
        """
        if not self.prompt:
            raise RequestRefused("the prompt is empty; give at least one token", reason="empty prompt")
        try:
            data = msgspec.msgpack.encode(self)
            msgspec.msgpack.decode(data, type=type(self))
        except (TypeError, ValueError, OverflowError) as error:
            # ValueError: msgspec's own ValidationError, and text that is no Unicode
            raise RequestRefused(f"the request cannot be served: {error}", reason=str(error)) from error
        if self.sampling.temperature != self.sampling.temperature:
            raise RequestRefused("the request cannot be served: temperature is not a number", reason="temperature")
        return len(data)

    @property
    def max_length(self) -> int:
        """Tokens in the cache at the worst: prompt plus permitted growth (C2.4)."""
        return len(self.prompt) + self.sampling.max_tokens


class FinishReason(enum.Enum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Admission:
    """One transfer as an engine gets it.  On P, ``reserved_prefix`` tokens need not be reported: D holds them
    already."""

    transfer: TransferId
    request: Request
    reserved_prefix: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class ComputedRange:
    """P: tokens ``[start, end)`` of the prompt are (or, once ``ready`` completes, will be) final in P's cache (C3.7).

    The ranges of one transfer tile ``[0, len(prompt))`` in order; what P had cached is part of the first range (C3.3).
    ``tables[plane]`` covers at least ``end`` tokens.  The range with ``last`` also carries ``final_slot``, the slot
    of the final payload; it may be empty (``start == end``) but is always reported (C3.4).

    Ownership: the blocks and the slot stay as they are until ``release_transfer``.
    """

    transfer: TransferId
    start: int
    end: int
    tables: Tables
    ready: DeviceEvent | None
    last: bool
    final_slot: int = 0
    #: Leading tokens that P found in its prefix cache; a statistic, stated with each range or only with the first.
    cached: int = 0


@dataclass(frozen=True, slots=True)
class StepOutput:
    """D: what one step produced for one transfer: new token ids with their exit depths, and whether that was the end.

    ``error`` is one request's fault; it ends that request only.
    """

    transfer: TransferId
    token_ids: tuple[int, ...] = ()
    exit_depths: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    error: Exception | None = None


class StageCallbacks(Protocol):
    """What core implements for the engine: lock-free, never blocks, never calls back into the engine."""

    def can_schedule(self, transfer: TransferId, tokens: int) -> bool:
        """P: advisory back-pressure: whether ``tokens`` more may be computed for this transfer now."""

    def prefill_submitted(self, computed: ComputedRange) -> None:
        """P: a range was launched on the device."""

    def reserved(self, reservation: Reservation) -> None:
        """D: memory is held, frozen and locally quiet (C2.7)."""

    def refused(self, transfer: TransferId, reason: str, retry: bool) -> None:
        """Both: nothing is held for it.  ``retry``: it could fit later (D only)."""

    def activated(self, transfer: TransferId) -> None:
        """D: ordinary admission gave the imported request a compute slot."""


#: ``allocate(id, kind, device, nbytes)``: memory that the transport can reach.
Allocator = Callable[[int, MemoryKind, int, int], MemoryRegion]


class StageEngine(Protocol):
    """What an inference engine implements.  See the module's text for threading."""

    role: Role
    geometry: KVGeometry

    def regions(self, allocate: Allocator | None) -> Sequence[MemoryRegion]:
        """The memory to register: cache storage and final payload slots.  Called once, before anything else.

        ``allocate`` is given where the transport demands memory of its own; the engine then lays its storage over it.
        Region ids agree with ``geometry``.
        """

    def attach(self, callbacks: StageCallbacks) -> None:
        """Who is told.  Called once, after ``regions``."""

    def capacity(self) -> Capacity:
        """What credits are made of.  Constant."""

    def reserve_transfer(self, admission: Admission) -> None:
        """Take part in a transfer.

        D: hold memory for the whole prompt and the final payload, and answer by ``callbacks.reserved`` or
        ``refused``, now or from a later step, once locally quiet.  P: start prefilling by itself as slots allow,
        reporting ranges;
        ``refused`` where it never can.
        """

    def accept_import(self, transfer: TransferId, valid: int) -> None:
        """D: every byte of tokens ``[0, valid)`` and of the final payload is in place.

        Publish validity and prefix, bind the final payload (copy it and return the slot), drop the lease, queue the
        request for ordinary admission (C2.3, C8.3).
        """

    def suspend_transfer(self, transfer: TransferId) -> DeviceEvent | None:
        """Compute no more of it, keep every byte.  Idempotent.

        Returns an event that completes when all device work already launched for it has (None: it has) (C5.3).
        """

    def release_transfer_compute(self, transfer: TransferId) -> None:
        """P, after the last range is ready: compute slot and runner state go; KV and final slot stay."""

    def release_transfer(self, transfer: TransferId) -> None:
        """Core has proof of quiet: end the lease, free, forget (C5.1, C5.2)."""

    def has_work(self) -> bool:
        """Whether ``step()`` would do anything now."""

    def step(self) -> Sequence[StepOutput]:
        """One forward.  One request's fault is ``StepOutput(error=...)``, never an exception."""

    def statistics(self) -> Mapping[str, float]:
        """Gauges for metrics and balance checks: at least ``blocks_free``, ``blocks_used``, ``blocks_leased``,
        ``blocks_prefix`` (cached, no owner) and ``final_slots_free``."""

    def close(self) -> None:
        """Drop the model and the storage.  Idempotent."""


class ColocatedEngine(StageEngine, Protocol):
    """An engine opened with :attr:`Role.COLOCATED`: the same scheduler and the same chunking, without a hand-off."""

    def add(self, transfer: TransferId, request: Request) -> None:
        """Queue a request; ``step`` reports its tokens, and its memory is free again after the last."""


class ProfilingEngine(StageEngine, Protocol):
    """An engine that can say what it spends its time on: both methods or neither, on the engine's thread.

    A stage profiles that thread by itself; this is for what it cannot see, kernels above all.  One session at a time.
    """

    def start_profile(self, stem: Path) -> None:
        """Begin.  Files will be ``stem`` with endings, in a directory that is there.  Raises where it cannot."""

    def stop_profile(self) -> Sequence[Path]:
        """End, write and return the files.  Whatever happens, nothing is profiled afterwards."""


class EnginePlugin(Protocol):
    """The object behind an entry point of the group ``kvbaton.engines``.  Importing it loads no framework.

    It may also have ``leftovers()``, as a connector's may: see :class:`~kvbaton.connector.WithLeftovers`.
    """

    name: str
    api_version: int
    #: A pydantic model with ``extra="forbid"``: the engine's own settings.
    Options: type[Any]

    def check(self, model: str, options: Any) -> None:
        """Raise :class:`~kvbaton.errors.ModelError` where ``model`` cannot be served, before any worker starts."""

    def tokenizer(self, model: str, options: Any) -> Tokenizer:
        """For applications: text to token ids and back."""

    def open(self, model: str, options: Any, role: Role, device: int | None) -> StageEngine:
        """Load the model and allocate the cache.  May take long; called in the stage's own thread or process."""


class Tokenizer(Protocol):
    """Text to token ids and back."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


class ChatTokenizer(Tokenizer, Protocol):
    """A tokenizer that also knows how its model wants a conversation written; to offer it is optional."""

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The prompt for the assistant's next message.  Each of ``messages`` has a ``role`` and a ``content``.

        Raises :class:`~kvbaton.errors.UnsupportedModel` where the model comes without a chat template, and
        :class:`~kvbaton.errors.RequestRefused` where its template does not take these messages.
        """
