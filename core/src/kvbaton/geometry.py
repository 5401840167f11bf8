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
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from kvbaton.errors import GeometryError, GeometryMismatch, SegmentError
from kvbaton.segments import FEW, Offsets, Regions, Row, Segments, coalesce, joined

Natural = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]

#: Block ids of a sequence, in token order: shape ``[blocks]``, any integer type; or a tuple of Python's integers, which
#: is planned sooner where it is short.
Table = npt.NDArray[Any] | tuple[int, ...]


class Component(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One tensor's worth of a token in one plane.  ``base``, ``block_stride``, ``token_bytes``: bytes.

    ``dtype`` is part of the meaning (two stages must agree); ``region``, ``base`` and ``block_stride`` are not.
    ``per_block``: one value per block instead of one per token (a scale of a whole block): ``token_bytes`` is then that
    value's size, and it travels with the one range that holds its block, so ranges of such a plane start at block
    edges, and an engine that has one reports a valid prefix rounded down to a block edge.
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
        identity = dict(self.identity)
        _require(
            all(isinstance(text, str) for item in identity.items() for text in item),
            "identity", f"is {identity!r}: names and values are text",
        )  # fmt: skip
        object.__setattr__(self, "identity", dict(sorted(identity.items())))
        object.__setattr__(self, "planes", tuple(self.planes))
        _require_natural(self.block_tokens, "block_tokens", at_least=1)
        _require(bool(self.planes), "planes", "is empty: a cache has at least one plane")
        names = [plane.name for plane in self.planes]
        _require(all(isinstance(name, str) for name in names), "planes", f"has names that are no text: {names}")
        _require(len(set(names)) == len(names), "planes", f"has a name twice: {', '.join(names)}")
        final = self._final_place()
        for plane in self.planes:
            where = f"plane {plane.name}"
            _require(bool(plane.components), where, "has no components")
            _require_natural(plane.blocks, f"{where}, blocks", at_least=1)
            # planes may share storage, as their tables tell them apart; what one table addresses may not (C3.2)
            shared = _overlap([*_places(plane, self.block_tokens), *final])
            if shared:
                _require(False, where, f"has bytes that belong twice: to {shared[0]} and to {shared[1]}")

    def _final_place(self) -> list[_Place]:
        for field in ("final_bytes", "final_region", "final_base", "final_stride", "final_slots"):
            _require_natural(getattr(self, field), field)
        if not self.final_bytes:
            return []
        _require_natural(self.final_slots, "final_slots", at_least=1)
        _require(
            self.final_stride >= self.final_bytes, "final_stride",
            f"is {self.final_stride}: slots of {self.final_bytes} bytes would overlap",
        )  # fmt: skip
        place = _Place(
            self.final_region, self.final_base, self.final_stride, self.final_bytes, self.final_slots, "the final slots"
        )
        return [place.checked()]

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
        return Segments.one(self.final_region, self.final_base + slot * self.final_stride, self.final_bytes)

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


def _require_natural(value: object, field: str, at_least: int = 0) -> None:
    # a numpy integer computes like one but does not travel
    _require(type(value) is int, field, f"is {value!r}: a plain integer is needed")
    _require(value >= at_least, field, f"is {value}: at least {at_least} is needed")  # type: ignore[operator]
    _require(value < 2**63, field, f"is {value}: sizes and offsets fit 64 bits")  # type: ignore[operator]


@dataclass(frozen=True, slots=True)
class _Place:
    """``count`` runs of ``extent`` bytes, ``stride`` apart."""

    region: int
    base: int
    stride: int
    extent: int
    count: int
    name: str

    def checked(self) -> _Place:
        _require(self.region < 2**31, self.name, f"lies in region {self.region}: ids fit 32 bits")
        _require(self.end < 2**63, self.name, f"ends at byte {self.end}: offsets fit 64 bits")
        return self

    @property
    def end(self) -> int:
        return self.base + (self.count - 1) * self.stride + self.extent


def _places(plane: Plane, block_tokens: int) -> list[_Place]:
    """Where a plane's components lie, checked."""
    return [
        _place(c, plane.blocks, block_tokens, f"plane {plane.name}, component {index}")
        for index, c in enumerate(plane.components)
    ]


def _place(c: Component, blocks: int, block_tokens: int, at: str) -> _Place:
    for field in ("region", "base"):
        _require_natural(getattr(c, field), f"{at}, {field}")
    for field in ("block_stride", "token_bytes"):
        _require_natural(getattr(c, field), f"{at}, {field}", at_least=1)
    # a dtype of some library or a numpy bool would not travel
    _require(type(c.dtype) is str, f"{at}, dtype", f"is {c.dtype!r}: text is needed")
    _require(type(c.per_block) is bool, f"{at}, per_block", f"is {c.per_block!r}: True or False is needed")
    extent = c.token_bytes * (1 if c.per_block else block_tokens)
    _require(
        c.block_stride >= extent, f"{at}, block_stride",
        f"is {c.block_stride}: a block of it has {extent} bytes, so blocks would overlap",
    )  # fmt: skip
    return _Place(c.region, c.base, c.block_stride, extent, blocks, at).checked()


def _overlap(places: Sequence[_Place]) -> tuple[str, str] | None:
    """The names of two that may share a byte, in whichever blocks.  Strides that do not fit together count as that."""
    ordered = sorted(places, key=lambda place: (place.region, place.base))
    region, base, stride, extent, end = np.array(
        [(p.region, p.base, p.stride, p.extent, p.end) for p in ordered], dtype=np.int64
    ).T
    for low in range(0, len(ordered), 256):  # pairs (i, j > i) in slabs, so that memory stays small
        i, j = np.nonzero(
            (region[low : low + 256, None] == region)
            & (base < end[low : low + 256, None])
            & (np.arange(len(ordered)) > np.arange(low, min(low + 256, len(ordered)))[:, None])
        )
        i += low
        # both repeat with the common period: within it, j lies behind i and ends before i comes again
        period = np.gcd(stride[i], stride[j])
        behind = (base[j] - base[i]) % period
        bad = (behind < extent[i]) | (behind > period - extent[j])
        if bad.any():
            first = int(np.argmax(bad))
            return ordered[i[first]].name, ordered[j[first]].name
    return None


def ready_range(sent: int, computed: int, block_tokens: int, last: bool) -> tuple[int, int]:
    """Which tokens to send now, given that ``sent`` are and ``computed`` could be: ``(start, end)``, maybe empty.

    The unfinished block is held back until the last range: a whole block is one segment over all layers, a partial
    one is one per layer, and would be cut again at every range.
    """
    end = computed if last else computed - computed % block_tokens
    return sent, max(end, sent)


# -- from one stage to another -----------------------------------------------------------------------------------------


class KVMap:
    """How tokens move from ``source`` to ``destination``; built once when two stages connect.

    Raises :class:`~kvbaton.errors.GeometryMismatch` where the two do not mean the same (C3.5).
    """

    def __init__(self, source: KVGeometry, destination: KVGeometry) -> None:
        source.require_compatible(destination, "source", "destination")
        self.source = source
        self.destination = destination
        pairs = list(zip(source.planes, destination.planes, strict=True))
        members = [_members(index, *pair) for index, pair in enumerate(pairs)]
        self._members = _Runs.of([run for plane in members for run in plane])
        self._whole = whole = _Runs.of([run for plane in members for run in _grouped(plane, source.block_tokens)])
        # unless a block fills its stride on both sides, consecutive blocks are not one run
        self._gapped = (whole.nbytes != whole.stride).any(axis=0)[:, None]
        self._any_gapped = bool(self._gapped.any())
        # groups that may begin where the one before ends: beyond that there is nothing to merge
        self._seams = 1 + np.flatnonzero((whole.region[:, 1:] == whole.region[:, :-1]).all(axis=0))
        self._blocks = np.array(
            [[[plane.blocks] for plane in side.planes] for side in (source, destination)], np.uint64
        )
        self._has_per_block = any(c.per_block for plane in source.planes for c in plane.components)
        self._pools, self._entangled = _shared_storage(destination)
        #: The same for few: members of all planes, whole blocks' groups of all planes, and both sides' block counts.
        self._few_members = [run for plane in members for run in plane]
        self._few_groups = [run for plane in members for run in _grouped(plane, source.block_tokens)]
        self._limits = tuple([plane.blocks for plane in side.planes] for side in (source, destination))

    def plan(
        self, source_tables: Sequence[Table], destination_tables: Sequence[Table], start: int, end: int
    ) -> tuple[Segments, Segments]:
        """Source and destination segments of tokens ``[start, end)`` in every plane, coalesced; each byte exactly once.

        ``source_tables[plane]`` and ``destination_tables[plane]``: block ids from the sequence's first token on,
        covering at least ``end`` tokens.  ``start`` and ``end`` need not be at block edges; nothing outside them is
        touched (C3.1).  A per-block value travels with the range that holds tokens of its block; so that there is one,
        a range of a geometry that has such values starts at a block edge, and only the last one may end elsewhere (as
        :func:`ready_range` has it).

        Raises :class:`~kvbaton.errors.SegmentError`, and plans nothing, for tables that are too short, block ids that
        do not exist (C3.6), a destination block that is named twice, in one plane or by planes that share storage
        (C3.2), or a range that starts inside a block whose per-block values the destination would then hold for part of
        its tokens only.
        """
        blocks = self._blocks_of(start, end, source_tables, destination_tables)
        if start == end:
            return Segments.empty(), Segments.empty()
        few = self._few_ids((source_tables, destination_tables), blocks)
        if few is not None:
            return self._few_segments(few[0], few[1], start, end)
        return self._planned(self._ids((source_tables, destination_tables), blocks), start, end)

    def check_destination(self, tables: Sequence[Table], start: int, end: int) -> None:
        """Raise what :meth:`plan` of tokens ``[start, end)`` would raise for the destination's tables alone."""
        blocks = self._blocks_of(start, end, tables, tables)
        if start < end and self._few_ids((tables,), blocks) is None:
            ids = self._ids((tables,), blocks)
            if self._entangled:
                self._planned(np.concatenate((ids, ids)), start, end)

    def _blocks_of(
        self, start: int, end: int, source_tables: Sequence[Table], destination_tables: Sequence[Table]
    ) -> range:
        """Which entries of the tables hold tokens ``[start, end)``."""
        tokens, planes = self.source.block_tokens, len(self.source.planes)
        if not 0 <= start <= end:
            raise SegmentError(f"C3.1: token range [{start}, {end}) is not one")
        if len(source_tables) != planes or len(destination_tables) != planes:
            raise SegmentError(
                f"C3.2: {len(source_tables)} source and {len(destination_tables)} target tables for {planes} planes"
            )
        if start < end and start % tokens and self._has_per_block:
            raise SegmentError(
                f"C3.3: token range [{start}, {end}) starts inside a block of {tokens} tokens, whose per-block values"
                " belong to all of its tokens: a valid prefix must end at a block edge here"
            )
        return range(start // tokens, -(-end // tokens))

    def _few_ids(self, sides: Sequence[Sequence[Table]], blocks: range) -> list[list[list[int]]] | None:
        """As :meth:`_ids`, in lists, where that is cheaper than numpy: of few runs, and where nothing is wrong with
        them; what is, it leaves to the close look."""
        if len(blocks) * len(self._few_members) > FEW or self._entangled:
            return None
        found = []
        for tables, limits in zip(sides, self._limits[-len(sides) :], strict=True):
            of_side = []
            for table, limit in zip(tables, limits, strict=True):
                if isinstance(table, tuple):
                    ids = [id for id in table[blocks.start : blocks.stop] if type(id) is int]
                elif isinstance(table, np.ndarray) and table.ndim == 1 and table.dtype.kind in "iu":
                    ids = table[blocks.start : blocks.stop].tolist()
                else:
                    return None
                if len(ids) < len(blocks) or min(ids) < 0 or max(ids) >= limit:
                    return None
                of_side.append(ids)
            found.append(of_side)
        of_target = found[-1]
        for pool in (*self._pools, *([plane] for plane in range(len(of_target)))):
            ids = [id for plane in pool for id in of_target[plane]]
            if len(set(ids)) < len(ids):
                return None
        return found

    def _few_segments(
        self, source: list[list[int]], target: list[list[int]], start: int, end: int
    ) -> tuple[Segments, Segments]:
        """As :meth:`_planned`, of :meth:`_few_ids`."""
        tokens = self.source.block_tokens
        head, tail, last = start % tokens, end % tokens, len(source[0]) - 1
        here: list[Row] = []
        there: list[Row] = []
        parts = [
            (range(1), head, tokens if last or not tail else tail) if head else None,
            (range(bool(head), last + (not tail)), 0, tokens),
            (range(last, last + 1), 0, tail) if tail and (last or not head) else None,
        ]
        for part in parts:
            if part is None:
                continue
            places, first, past = part
            whole = past - first == tokens
            for run in self._few_groups if whole else self._few_members:
                nbytes = run.nbytes if whole else run.token_bytes * (past - first) + run.fixed_bytes
                skip = run.token_bytes * first
                for at in places:
                    offset = run.base[0] + source[run.plane][at] * run.stride[0] + skip
                    goal = run.base[1] + target[run.plane][at] * run.stride[1] + skip
                    if here and _follows(here[-1], run.region[0], offset) and _follows(there[-1], run.region[1], goal):
                        here[-1] = (*here[-1][:2], here[-1][2] + nbytes)
                        there[-1] = (*there[-1][:2], there[-1][2] + nbytes)
                    else:
                        here.append((run.region[0], offset, nbytes))
                        there.append((run.region[1], goal, nbytes))
        return Segments.of_few(here), Segments.of_few(there)

    def _planned(self, ids: Offsets, start: int, end: int) -> tuple[Segments, Segments]:
        """Of blocks that are known to exist and to be distinct."""
        tokens = self.source.block_tokens
        source, target = self._segments(ids, start % tokens, end % tokens)
        if self._entangled and not target.disjoint():
            raise SegmentError(
                "C3.2: the destination's planes share storage, and its tables give the same bytes to two of them"
            )
        return source, target

    def _segments(self, ids: Offsets, head: int, tail: int) -> tuple[Segments, Segments]:
        """Of the first block from token ``head`` on, of the last one until token ``tail`` (0: its end)."""
        count, tokens = ids.shape[2], self.source.block_tokens
        if not head and not tail:
            return self._whole_blocks(ids)
        if count == 1:
            return coalesce(*self._members.of_tokens(ids[:, :, 0], head, tail or tokens))
        parts = []
        low, high = (1 if head else 0), (count - (1 if tail else 0))
        if head:
            parts.append(self._members.of_tokens(ids[:, :, 0], head, tokens))
        if high > low:
            parts.append(self._whole_blocks(ids[:, :, low:high]))
        if tail:
            parts.append(self._members.of_tokens(ids[:, :, -1], 0, tail))
        return coalesce(*joined(*parts))

    def _whole_blocks(self, ids: Offsets) -> tuple[Segments, Segments]:
        """Every group in every block, coalesced."""
        groups, blocks = len(self._whole.plane), ids.shape[2]
        follows = (ids[:, :, 1:] - ids[:, :, :-1] == 1).all(axis=0)
        if follows.any():
            # one segment for each run of consecutive blocks, found before any is spelled out
            begins = np.ones((len(follows), blocks), dtype=np.bool_)
            np.logical_not(follows, out=begins[:, 1:])
            begins = begins.take(self._whole.plane, axis=0)
            if self._any_gapped:
                begins |= self._gapped
            at = np.flatnonzero(begins)
            group = at // blocks
            count = np.empty_like(at)
            np.subtract(at[1:], at[:-1], out=count[:-1])
            count[-1] = groups * blocks - at[-1]
            source, target = self._whole.in_some_blocks(ids, group, at - group * blocks, count)
            seams = at.searchsorted(self._seams * blocks)
        else:
            source, target = self._whole.in_all_blocks(ids)
            seams = self._seams * blocks
        if len(seams) and _any_follows(source, target, seams):
            return coalesce(source, target)
        return source, target

    def _ids(self, sides: Sequence[Sequence[Table]], blocks: range) -> Offsets:
        """Those entries of each plane's table, checked: shape ``[sides, planes, blocks]``.

        ``sides``: the tables of both, or the destination's alone.
        """
        names, limits = _SIDES[-len(sides) :], self._blocks[-len(sides) :]
        ids = np.empty((len(sides), len(self.source.planes), len(blocks)), dtype=np.int64)
        for side, tables in reversed(tuple(enumerate(sides))):
            for plane, given in enumerate(tables):
                table = np.asarray(given)
                if table.ndim != 1 or len(table) < blocks.stop or table.dtype.kind not in "iu":
                    name = self.source.planes[plane].name
                    raise SegmentError(
                        f"C3.6: the {names[side]} table of plane {name} is {table.dtype}{list(table.shape)}:"
                        f" {blocks.stop} integer block ids are needed",
                        plane=name,
                    )
                ids[side, plane] = table[blocks.start : blocks.stop]
        wrong = ids.view(np.uint64) >= limits  # negative ones are huge
        if wrong.any():
            side = len(sides) - 1 if wrong[-1].any() else 0
            plane, at = (int(index[0]) for index in np.nonzero(wrong[side]))
            name, bad = self.source.planes[plane].name, int(ids[side, plane, at])
            raise SegmentError(
                f"C3.6: block {bad} in the {names[side]} table of plane {name}: there are"
                f" {int(limits[side, plane, 0])}",
                plane=name, block=bad,
            )  # fmt: skip
        self._require_distinct(ids[-1])
        return ids

    def _require_distinct(self, ids: Offsets) -> None:
        """No block of the destination is named twice, by one plane or by planes that share storage (C3.2)."""
        if ids.shape[1] > 1:
            ordered = np.sort(ids, axis=1)
            twice = ordered[:, 1:] == ordered[:, :-1]
            if twice.any():
                plane, at = (int(index[0]) for index in np.nonzero(twice))
                name, bad = self.source.planes[plane].name, int(ordered[plane, at])
                raise SegmentError(
                    f"C3.2: block {bad} is twice in the destination table of plane {name}", plane=name, block=bad
                )
        for pool in self._pools:
            ordered = np.sort(ids[pool], axis=None)
            twice = ordered[1:] == ordered[:-1]
            if twice.any():
                bad = int(ordered[int(np.argmax(twice))])
                names = ", ".join(self.source.planes[plane].name for plane in pool)
                raise SegmentError(
                    f"C3.2: block {bad} is twice in the destination tables of planes {names}, which share storage",
                    block=bad,
                )


def _follows(row: Row, region: int, offset: int) -> bool:
    return row[0] == region and row[1] + row[2] == offset


_SIDES = ("source", "destination")


def _shared_storage(geometry: KVGeometry) -> tuple[list[list[int]], bool]:
    """Planes that lie in the same places, so that only their tables' block ids tell them apart; and whether storage is
    shared in any other way."""
    alike: dict[frozenset[tuple[int, int, int, int]], list[int]] = {}
    places = [_places(plane, geometry.block_tokens) for plane in geometry.planes]
    for index, of_plane in enumerate(places):
        alike.setdefault(frozenset((p.region, p.base, p.stride, p.extent) for p in of_plane), []).append(index)
    pools = list(alike.values())
    entangled = _overlap([place for pool in pools for place in places[pool[0]]]) is not None
    return [pool for pool in pools if len(pool) > 1], entangled


class _Run(NamedTuple):
    """Bytes of one block: a group of components that follow each other without a gap on both sides, or one of them.

    Pairs are (source, target).  ``nbytes`` in a whole block; of tokens ``[a, b)`` there are
    ``fixed_bytes + (b - a) * token_bytes``.
    """

    plane: int
    region: tuple[int, int]
    base: tuple[int, int]
    stride: tuple[int, int]
    nbytes: int
    token_bytes: int
    fixed_bytes: int


@dataclass(frozen=True, slots=True)
class _Runs:
    """:class:`_Run` as columns, shape ``[runs]`` or ``[2, runs]``, so that planning is broadcasting: runs by blocks."""

    plane: Offsets
    region: Regions
    base: Offsets
    stride: Offsets
    nbytes: Offsets
    token_bytes: Offsets
    fixed_bytes: Offsets

    @classmethod
    def of(cls, runs: Sequence[_Run]) -> _Runs:
        plane, region, base, stride, *sizes = zip(*runs, strict=True)
        return cls(
            np.array(plane), np.array(region, np.int32).T.copy(), np.array(base).T.copy(), np.array(stride).T.copy(),
            *map(np.array, sizes),
        )  # fmt: skip

    def in_all_blocks(self, ids: Offsets) -> tuple[Segments, Segments]:
        """Every run in every block of its plane, block after block within a run."""
        shape = len(self.plane), ids.shape[2]
        # one allocation for each type: several large ones at once go back to the system after every call, and their
        # pages cost more than the arithmetic
        columns = np.empty((3, *shape), dtype=np.int64)
        offsets, length = columns[:2], columns[2]
        ids.take(self.plane, axis=1, out=offsets, mode="clip")
        offsets *= self.stride[:, :, None]
        offsets += self.base[:, :, None]
        length[:] = self.nbytes[:, None]
        return _pair(self.region.repeat(shape[1], axis=1), offsets.reshape(2, -1), length.reshape(-1))

    def in_some_blocks(self, ids: Offsets, run: Offsets, block: Offsets, count: Offsets) -> tuple[Segments, Segments]:
        """``count`` consecutive blocks from ``block`` on, for each of the runs ``run``."""
        plane, blocks = self.plane.take(run), ids.shape[2]
        offsets = ids.reshape(2, -1).take(plane * blocks + block, axis=1)
        offsets *= self.stride.take(run, axis=1)
        offsets += self.base.take(run, axis=1)
        return _pair(self.region.take(run, axis=1), offsets, count * self.nbytes.take(run))

    def of_tokens(self, ids: Offsets, start: int, end: int) -> tuple[Segments, Segments]:
        """Every run's tokens ``[start, end)`` in one block of its plane; ids: shape ``[2, planes]``."""
        offsets = ids.take(self.plane, axis=1)
        offsets *= self.stride
        offsets += self.base
        if start:
            offsets += self.token_bytes * start
        return _pair(self.region, offsets, self.token_bytes * (end - start) + self.fixed_bytes)


def _pair(region: Regions, offset: Offsets, length: Offsets) -> tuple[Segments, Segments]:
    """Of arrays that nobody writes any more: regions and offsets of shape ``[2, n]``, lengths ``[n]``."""
    return Segments._trusted(region[0], offset[0], length), Segments._trusted(region[1], offset[1], length)


def _any_follows(source: Segments, target: Segments, at: Offsets) -> bool:
    """Whether a segment of index ``at`` begins, on both sides, where the one before it in the same region ends."""
    before = at - 1
    length = source.length[before]
    return bool(
        np.any(
            (source.offset[at] == source.offset[before] + length)
            & (target.offset[at] == target.offset[before] + length)
        )
    )


def _members(index: int, source: Plane, destination: Plane) -> list[_Run]:
    """One run for each component of plane ``index``, in order of its place at the source; ``nbytes`` is left open."""
    runs = [
        _Run(
            index, (s.region, d.region), (s.base, d.base), (s.block_stride, d.block_stride), 0,
            0 if s.per_block else s.token_bytes, s.token_bytes if s.per_block else 0,
        )
        for s, d in zip(source.components, destination.components, strict=True)
    ]  # fmt: skip
    return sorted(runs, key=lambda run: (run.region[0], run.stride[0], run.base[0]))


def _grouped(members: Sequence[_Run], tokens: int) -> list[_Run]:
    """Members of one plane merged where the next begins where the last ends, on both sides, in every block."""
    groups: list[_Run] = []
    for run in members:
        nbytes = run.token_bytes * tokens + run.fixed_bytes
        if groups:
            last = groups[-1]
            end = last.base[0] + last.nbytes, last.base[1] + last.nbytes
            if (run.region, run.stride, run.base) == (last.region, last.stride, end):
                groups[-1] = last._replace(nbytes=last.nbytes + nbytes)
                continue
        groups.append(run._replace(nbytes=nbytes))
    return groups
