"""The chunks of a move, cut alike at both ends and by whoever asks for it."""

from __future__ import annotations

from kvbaton.segments import Segments, split


def batched(
    reads: Segments, writes: Segments, chunk_bytes: int, chunk_segments: int, alignment: int
) -> list[tuple[Segments, Segments]]:
    """What a move is made of; no segments at all are one empty chunk: a receipt without bytes."""
    return split(reads, writes, chunk_bytes, chunk_segments, alignment=alignment) or [(reads, writes)]
