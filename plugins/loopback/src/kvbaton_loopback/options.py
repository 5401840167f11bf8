"""The settings of the transport: ``transport.options`` in kvbaton's configuration."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class LoopbackOptions(BaseModel):
    """How bytes are carried.  The defaults are a perfect wire; everything else is there to make life harder in
    tests.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    carrier: Literal["thread", "manual"] = Field(
        "thread", description="who carries: the wire's own thread, or a test that steps it"
    )
    queue_limit: Annotated[int, Field(ge=1)] = Field(
        256, description="chunks per peer that may wait; more are refused until there is room (T6)"
    )
    latency: Annotated[float, Field(ge=0)] = Field(
        0.0, description="seconds from submission to arrival, added to each chunk"
    )
    bandwidth: Annotated[float, Field(ge=0)] = Field(0.0, description="bytes per second; 0 is as fast as memory")
    reorder: Annotated[int, Field(ge=0)] = Field(0, description="a chunk may fall behind up to this many later ones")
    duplicate_receipts: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0, description="probability that a receipt is reported a second time, later"
    )
    seed: int = Field(0, description="of everything drawn at random; equal seeds and submissions give equal draws")
    fail_chunks: frozenset[Annotated[int, Field(ge=0)]] = Field(
        frozenset(), description="these submissions of a connector, counted from 0, end as FAILED and move no byte"
    )
    stall_chunks: frozenset[Annotated[int, Field(ge=0)]] = Field(
        frozenset(), description="these submissions start and go no further, until the wire is told to resume them"
    )
