"""``transport.options`` of ``transport.name = "nixl"``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from kvbaton.byte_size import InBytes
from kvbaton.ucx import check_names

#: Whether chunks are packed.
Packing = Literal["auto", "always", "never"]


class NixlOptions(BaseModel):
    """Every field has a default that fits one host; an option that nobody reads is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    backend: Literal["UCX"] = Field("UCX", description="NIXL's backend; UCX is what this plugin was proved with")
    ucx: dict[str, str] = Field(
        default_factory=dict,
        description='settings of UCX without their prefix, as in {"TLS": "tcp,self"}; they override UCX_* variables',
    )
    inflight_chunks: Annotated[int, Field(ge=1, le=4096)] = Field(
        128, description="chunks per peer that are posted and not done; more are refused until there is room (T6)"
    )
    packing: Packing = Field(
        "auto",
        description="gather short segments, write them as one, scatter them at the destination; auto: where their mean"
        " length is below packing_below, and the device can",
    )
    packing_below: Annotated[InBytes, Field(ge=1)] | None = Field(
        None, description="bytes; by default what was measured: 12 KiB in host memory, 2 MiB in device memory"
    )
    staging_slots: Annotated[int, Field(ge=1, le=256)] = Field(
        4, description="slots per peer to send packed parts from, and as many to receive them in"
    )
    staging_bytes: Annotated[InBytes, Field(ge=4096, le=1 << 32)] | None = Field(
        None, description="bytes of a slot; by default 4 MiB in host memory, 64 MiB in device memory"
    )
    heartbeat: Annotated[float, Field(ge=0.01, le=60)] = Field(
        0.25, description="seconds between two pings of a peer; a peer that is gone is noticed within one of them (T7)"
    )
    telemetry: bool = Field(
        False,
        description="let NIXL measure each write; a stage's statistics then have the sums: connector_writes_total,"
        " connector_write_descriptors_total, ..._bytes_total, ..._posting_seconds_total, ..._seconds_total",
    )
    log_level: Literal["FATAL", "ERROR", "WARN", "INFO", "DEBUG", "TRACE"] = Field(
        "FATAL",
        description="what NIXL and UCX print; what they report is in our errors, so by default they print nothing",
    )

    @field_validator("ucx")
    @classmethod
    def _names(cls, value: dict[str, str]) -> dict[str, str]:
        check_names(value)
        return value
