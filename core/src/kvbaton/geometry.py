"""Where the KV of a token lies, and how a range of tokens maps from one stage's memory to another's.

A *plane* is a block table's worth of storage: one for an ordinary decoder and for a SHARED looped model, one per
depth for LAST_EXITED.  A plane's *components* are one tensor's worth of a token each: K or V of one layer, a scale of
a quantised cache. Token ``o`` of block ``b`` of a component lies at ``base + b * block_stride + o * token_bytes`` in
its region.  That covers per-layer tensors, ``[block, layer, token, ...]`` storage, MLA without V and scale planes
alike.

Two stages must agree in what the bytes *mean* (C3.5); they may differ in where they *lie*: block counts, strides,
bases, regions.

All values are immutable and safe to share between threads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvbaton.errors import GeometryError, GeometryMismatch, SegmentError
from kvbaton.segments import Offsets, Regions, Segments, coalesce

Natural = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]

#: Block ids of a sequence, in token order: shape ``[blocks]``, any integer type.
Table = npt.NDArray[Any]


class Component(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One tensor's worth of a token in one plane.  ``base``, ``block_stride``, ``token_bytes``: bytes.

    ``dtype`` is part of the meaning (two stages must agree); ``region``, ``base`` and ``block_stride`` are not.
    ``per_block``: one value per block instead of one per token (a scale of a whole block): ``token_bytes`` is then that
    value's size, and it travels once, with the range that completes the block or, for an unfinished one, with the last.
    """

    region: Natural
    base: Natural
    block_stride: Positive
    token_bytes: Positive
    dtype: str = ""
    per_block: bool = False


class Plane(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The components that share one block table, and how many blocks their storage has."""

    name: str
    components: tuple[Component, ...]
    blocks: Positive


class _Wire(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    identity: dict[str, str]
    block_tokens: int
    planes: tuple[Plane, ...]
    final_bytes: int
    final_region: int
    final_base: int
    final_stride: int
    final_slots: int


@dataclass(frozen=True, eq=False)
class KVGeometry:
    """The layout of one stage's KV cache and final payload slots.

    ``identity``: what the bytes mean beyond their shape: weights digest, dtype, rope and attention configuration.
    ``final_bytes`` of a final payload lie at ``final_base + slot * final_stride`` in ``final_region``; 0 bytes where D
    recomputes the last prompt token.  Raises :class:`~kvbaton.errors.GeometryError`, which names the field, where the
    values contradict each other.
    """

    identity: Mapping[str, str]
    block_tokens: int
    planes: tuple[Plane, ...]
    final_bytes: int
    final_region: int = 0
    final_base: int = 0
    final_stride: int = 0
    final_slots: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "identity", dict(sorted(self.identity.items())))
        object.__setattr__(self, "planes", tuple(self.planes))
        _require(self.block_tokens >= 1, "block_tokens", f"is {self.block_tokens}: a block holds at least 1 token")
        _require(bool(self.planes), "planes", "is empty: a cache has at least one plane")
        names = [plane.name for plane in self.planes]
        _require(len(set(names)) == len(names), "planes", f"has a name twice: {', '.join(names)}")
        for plane in self.planes:
            where = f"plane {plane.name}"
            _require(bool(plane.components), where, "has no components")
            _require(plane.blocks >= 1, f"{where}, blocks", f"is {plane.blocks}: at least 1 is needed")
            for index, c in enumerate(plane.components):
                at = f"{where}, component {index}"
                _require(c.token_bytes >= 1, f"{at}, token_bytes", f"is {c.token_bytes}: at least 1 is needed")
                _require(min(c.region, c.base) >= 0, at, "has a negative region or base")
                extent = c.token_bytes * (1 if c.per_block else self.block_tokens)
                _require(
                    c.block_stride >= extent, f"{at}, block_stride",
                    f"is {c.block_stride}: a block of it has {extent} bytes, so blocks would overlap",
                )  # fmt: skip
        _require(self.final_bytes >= 0, "final_bytes", f"is {self.final_bytes}: it cannot be negative")
        if self.final_bytes:
            _require(
                self.final_slots >= 1, "final_slots", f"is {self.final_slots}: at least 1 is needed for a final payload"
            )
            _require(min(self.final_region, self.final_base) >= 0, "final_base", "or final_region is negative")
            _require(
                self.final_stride >= self.final_bytes, "final_stride",
                f"is {self.final_stride}: slots of {self.final_bytes} bytes would overlap",
            )  # fmt: skip

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KVGeometry) and self._wire() == other._wire()

    def __hash__(self) -> int:
        return hash(self.encode())

    # -- meaning -------------------------------------------------------------------------------------------------------

    def fingerprint(self) -> list[tuple[str, object]]:
        """What must be equal on two stages that hand over to each other (C3.5), as named values in a fixed order."""
        facts: list[tuple[str, object]] = [(f"identity.{key}", value) for key, value in self.identity.items()]
        facts.append(("block_tokens", self.block_tokens))
        facts.append(("planes", tuple(plane.name for plane in self.planes)))
        for plane in self.planes:
            facts.append((f"components (plane {plane.name})", len(plane.components)))
            for index, component in enumerate(plane.components):
                where = f"(plane {plane.name}, component {index})"
                facts.append((f"token_bytes {where}", component.token_bytes))
                facts.append((f"dtype {where}", component.dtype))
                facts.append((f"per_block {where}", component.per_block))
        facts.append(("final_bytes", self.final_bytes))
        return facts

    def require_compatible(self, other: KVGeometry, ours: str = "here", theirs: str = "there") -> None:
        """Raise :class:`~kvbaton.errors.GeometryMismatch` naming the first field that differs, with both values
        (C3.5)."""
        mine, its = dict(self.fingerprint()), dict(other.fingerprint())
        # shape before detail: a missing plane explains a missing component
        for field in dict.fromkeys([*mine, *its]):
            if mine.get(field) != its.get(field):
                raise GeometryMismatch(
                    field, mine.get(field, "absent"), its.get(field, "absent"), f"{ours} and {theirs}"
                )

    @property
    def nbytes_per_token(self) -> int:
        """Bytes of one token over all planes and per-token components."""
        return sum(c.token_bytes for plane in self.planes for c in plane.components if not c.per_block)

    def blocks_for(self, tokens: int) -> int:
        """Blocks of each plane's table that ``tokens`` tokens need."""
        return -(-tokens // self.block_tokens)

    # -- place ---------------------------------------------------------------------------------------------------------

    def final_segment(self, slot: int) -> Segments:
        """The bytes of one final payload slot; none where ``final_bytes`` is 0.

        Raises :class:`~kvbaton.errors.SegmentError` for a slot that does not exist (C3.6).
        """
        if not self.final_bytes:
            return Segments.empty()
        if not 0 <= slot < self.final_slots:
            raise SegmentError(f"C3.6: final slot {slot} does not exist: there are {self.final_slots}")
        return Segments.of([(self.final_region, self.final_base + slot * self.final_stride, self.final_bytes)])

    # -- the wire ------------------------------------------------------------------------------------------------------

    def encode(self) -> bytes:
        """For an :class:`~kvbaton.connector.Endpoint`."""
        return msgspec.msgpack.encode(self._wire())

    @classmethod
    def decode(cls, data: bytes) -> KVGeometry:
        """From :meth:`encode`, strictly.  Raises :class:`~kvbaton.errors.GeometryError` for anything else."""
        try:
            wire = msgspec.msgpack.decode(data, type=_Wire)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError, ValueError) as error:
            raise GeometryError(f"not a geometry: {error}", field="") from error
        return cls(*(getattr(wire, field) for field in wire.__struct_fields__))

    def _wire(self) -> _Wire:
        return _Wire(
            dict(self.identity), self.block_tokens, self.planes, self.final_bytes, self.final_region, self.final_base,
            self.final_stride, self.final_slots,
        )  # fmt: skip


def _require(condition: bool, field: str, text: str) -> None:
    if not condition:
        raise GeometryError(f"geometry: {field} {text}", field=field)


def ready_range(sent: int, computed: int, block_tokens: int, last: bool) -> tuple[int, int]:
    """Which tokens to send now, given that ``sent`` are and ``computed`` could be: ``(start, end)``, maybe empty.

    The unfinished block is held back until the last range: a whole block is one segment over all layers, a partial
    one is one per layer, and would be cut again at every range.
    """
    end = computed if last else computed - computed % block_tokens
    return sent, max(end, sent)


# -- from one stage to another
# ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Group:
    """Components that follow each other without a gap in every block, on both sides: one segment per whole block."""

    source_region: int
    source_base: int
    source_stride: int
    target_region: int
    target_base: int
    target_stride: int
    #: Bytes of a whole block; of one token, and offset of the token part, per member.
    nbytes: int
    members: tuple[tuple[int, int], ...]  # (offset in the group, token_bytes)
    per_block: bool


class KVMap:
    """How tokens move from ``source`` to ``destination``; built once when two stages connect.

    Raises :class:`~kvbaton.errors.GeometryMismatch` where the two do not mean the same (C3.5).
    """

    def __init__(self, source: KVGeometry, destination: KVGeometry) -> None:
        source.require_compatible(destination, "source", "destination")
        self.source = source
        self.destination = destination
        self._tokens = source.block_tokens
        self._planes = [
            _PlaneMap(_grouped(s, d, self._tokens), s.blocks, d.blocks, self._tokens, s.name)
            for s, d in zip(source.planes, destination.planes, strict=True)
        ]

    def plan(
        self, source_tables: Sequence[Table], destination_tables: Sequence[Table], start: int, end: int
    ) -> tuple[Segments, Segments]:
        """Source and destination segments of tokens ``[start, end)`` in every plane, coalesced; each byte exactly once.

        ``source_tables[plane]`` and ``destination_tables[plane]``: block ids from the sequence's first token on,
        covering at least ``end`` tokens.  ``start`` and ``end`` need not be at block edges; nothing outside them is
        touched (C3.1). A per-block component belongs to the range that holds its block's first token at or after
        ``start``: callers that send whole blocks first and an unfinished one last send it exactly once.

        Raises :class:`~kvbaton.errors.SegmentError` for tables that are too short or block ids that do not exist
        (C3.6).
        """
        if not 0 <= start <= end:
            raise SegmentError(f"C3.1: token range [{start}, {end}) is not one")
        planes = len(self._planes)
        if len(source_tables) != planes or len(destination_tables) != planes:
            raise SegmentError(
                f"C3.2: {len(source_tables)} source and {len(destination_tables)} target tables for {planes} planes"
            )
        if start == end:
            return Segments.empty(), Segments.empty()
        parts = [
            plane.plan(np.asarray(source), np.asarray(target), start, end)
            for plane, source, target in zip(self._planes, source_tables, destination_tables, strict=True)
        ]
        source_parts = [part for part, _ in parts]
        target_parts = [part for _, part in parts]
        return coalesce(source_parts[0].concat(*source_parts[1:]), target_parts[0].concat(*target_parts[1:]))


class _PlaneMap:
    """One plane's groups as columns, so that planning is broadcasting: groups by blocks."""

    def __init__(
        self, groups: Sequence[_Group], source_blocks: int, target_blocks: int, tokens: int, name: str
    ) -> None:
        self._blocks = source_blocks, target_blocks
        self._tokens = tokens
        self._name = name
        self._whole = _Columns.of_groups(groups)
        # partial blocks: per member; a member of a per-block group is sent as it is
        self._parts = _Columns.of_members([g for g in groups if not g.per_block], tokens)
        self._units = _Columns.of_groups([g for g in groups if g.per_block])

    def plan(self, source: Table, target: Table, start: int, end: int) -> tuple[Segments, Segments]:
        tokens = self._tokens
        last = -(-end // tokens)
        first = start // tokens
        ids = self._ids(source, 0, first, last), self._ids(target, 1, first, last)
        head, tail = start % tokens, end % tokens
        if last - first == 1 and (head or tail):
            return self._partial(ids, 0, head, tail or tokens, head == 0)
        parts = []
        lo, hi = (1 if head else 0), (last - first - (1 if tail else 0))
        if head:
            parts.append(self._partial(ids, 0, head, tokens, False))
        if hi > lo:
            parts.append(self._whole.at(ids[0][lo:hi], ids[1][lo:hi]))
        if tail:
            parts.append(self._partial(ids, last - first - 1, 0, tail, True))
        return _joined(parts)

    def _partial(
        self, ids: tuple[Offsets, Offsets], index: int, start: int, end: int, units: bool
    ) -> tuple[Segments, Segments]:
        """Tokens ``[start, end)`` of one block, per member; with its per-block values where ``units``."""
        source, target = ids[0][index : index + 1], ids[1][index : index + 1]
        parts = [self._parts.at(source, target, start, end)]
        if units:
            parts.append(self._units.at(source, target))
        return _joined(parts)

    def _ids(self, table: Table, side: int, first: int, last: int) -> Offsets:
        """Block ids ``[first, last)`` of a table, checked."""
        which = ("source", "destination")[side]
        if table.ndim != 1 or len(table) < last:
            raise SegmentError(
                f"C3.6: the {which} table of plane {self._name} has {table.size} blocks, {last} are needed",
                plane=self._name,
            )
        ids = table[first:last].astype(np.int64)
        if ids.size and (ids.min() < 0 or ids.max() >= self._blocks[side]):
            bad = int(ids[(ids < 0) | (ids >= self._blocks[side])][0])
            raise SegmentError(
                f"C3.6: block {bad} in the {which} table of plane {self._name}: there are {self._blocks[side]}",
                plane=self._name, block=bad,
            )  # fmt: skip
        return ids


@dataclass(frozen=True)
class _Columns:
    """Runs of a block as columns, shape ``[runs]``; ``token_bytes`` scales a partial run."""

    source_region: Regions
    source_base: Offsets
    source_stride: Offsets
    target_region: Regions
    target_base: Offsets
    target_stride: Offsets
    nbytes: Offsets
    token_bytes: Offsets

    @classmethod
    def of_groups(cls, groups: Sequence[_Group]) -> _Columns:
        return cls._of([(g, 0, g.nbytes, 0) for g in groups])

    @classmethod
    def of_members(cls, groups: Sequence[_Group], tokens: int) -> _Columns:
        return cls._of([(g, offset, size * tokens, size) for g in groups for offset, size in g.members])

    @classmethod
    def _of(cls, runs: Sequence[tuple[_Group, int, int, int]]) -> _Columns:
        def column(kind: Any, values: list[int]) -> npt.NDArray[Any]:
            return np.array(values, dtype=kind)

        return cls(
            column(np.int32, [g.source_region for g, *_ in runs]),
            column(np.int64, [g.source_base + offset for g, offset, *_ in runs]),
            column(np.int64, [g.source_stride for g, *_ in runs]),
            column(np.int32, [g.target_region for g, *_ in runs]),
            column(np.int64, [g.target_base + offset for g, offset, *_ in runs]),
            column(np.int64, [g.target_stride for g, *_ in runs]),
            column(np.int64, [nbytes for *_, nbytes, _ in runs]),
            column(np.int64, [size for *_, size in runs]),
        )

    def at(
        self, source: Offsets, target: Offsets, start: int | None = None, end: int | None = None
    ) -> tuple[Segments, Segments]:
        """The runs in each of the given blocks, block after block within a run; tokens ``[start, end)`` or all of
        it."""
        runs, blocks = len(self.nbytes), len(source)
        if not runs or not blocks:
            return Segments.empty(), Segments.empty()
        source_offset = self.source_base[:, None] + self.source_stride[:, None] * source[None, :]
        target_offset = self.target_base[:, None] + self.target_stride[:, None] * target[None, :]
        length = self.nbytes
        if start is not None and end is not None:
            source_offset += (self.token_bytes * start)[:, None]
            target_offset += (self.token_bytes * start)[:, None]
            length = self.token_bytes * (end - start)
        lengths = np.repeat(length, blocks)
        return (
            Segments._trusted(np.repeat(self.source_region, blocks), source_offset.ravel(), lengths),
            Segments._trusted(np.repeat(self.target_region, blocks), target_offset.ravel(), lengths),
        )


def _joined(parts: Sequence[tuple[Segments, Segments]]) -> tuple[Segments, Segments]:
    if not parts:
        return Segments.empty(), Segments.empty()
    first, *others = parts
    return first[0].concat(*(s for s, _ in others)), first[1].concat(*(t for _, t in others))


def _grouped(source: Plane, destination: Plane, tokens: int) -> list[_Group]:
    """Components in order of their place, merged where the next begins where the last ends, on both sides, in every
    block."""
    pairs = sorted(
        zip(source.components, destination.components, strict=True),
        key=lambda pair: (pair[0].per_block, pair[0].region, pair[0].block_stride, pair[0].base),
    )
    groups: list[_Group] = []
    for s, d in pairs:
        nbytes = s.token_bytes * (1 if s.per_block else tokens)
        last = groups[-1] if groups else None
        if (
            last is not None
            and last.per_block == s.per_block
            and (last.source_region, last.source_stride) == (s.region, s.block_stride)
            and (last.target_region, last.target_stride) == (d.region, d.block_stride)
            and last.source_base + last.nbytes == s.base
            and last.target_base + last.nbytes == d.base
        ):
            groups[-1] = _Group(
                last.source_region, last.source_base, last.source_stride, last.target_region, last.target_base,
                last.target_stride, last.nbytes + nbytes, (*last.members, (last.nbytes, s.token_bytes)), s.per_block,
            )  # fmt: skip
        else:
            groups.append(
                _Group(s.region, s.base, s.block_stride, d.region, d.base, d.block_stride, nbytes,
                       ((0, s.token_bytes),), s.per_block)
            )  # fmt: skip
    return groups
