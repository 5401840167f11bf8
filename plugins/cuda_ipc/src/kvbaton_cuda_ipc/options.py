"""``transport.options`` of ``transport.name = "ucx"``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from kvbaton.byte_size import InBytes
from kvbaton.ucx import check_names


class WireOptions(BaseModel):
    """How UCX connects the stages.  Every field has a default that fits one host."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    interface: str = Field(
        "lo",
        min_length=1,
        max_length=200,
        description="the network interface that stages connect over; nothing listens on any other",
    )
    ucx: dict[str, str] = Field(
        default_factory=dict,
        description='settings of UCX without their prefix, as in {"TLS": "tcp,self"}; they override UCX_* variables',
    )
    log_level: Literal["fatal", "error", "warn", "info", "debug", "trace"] = Field(
        "fatal",
        description="what UCX prints; what it reports is in our errors, so by default it prints nothing",
    )

    @field_validator("ucx")
    @classmethod
    def _names(cls, value: dict[str, str]) -> dict[str, str]:
        check_names(value)
        return value

    def settings(self) -> dict[str, str]:
        """For UCX's context."""
        # larger pieces cost a third less of the processor
        return {"NET_DEVICES": self.interface, "TCP_TX_SEG_SIZE": "256k", "TCP_RX_SEG_SIZE": "256k", **self.ucx}


class UcxOptions(WireOptions):
    """An option that nobody reads is an error."""

    queue_limit: Annotated[int, Field(ge=1, le=4096)] = Field(
        128, description="chunks per peer that are accepted and not done; more are refused until there is room (T6)"
    )
    slots: Annotated[int, Field(ge=1, le=64)] = Field(
        4, description="slots per peer to receive in, and as many to send from: as many parts of chunks are under way"
    )
    slot_bytes: Annotated[InBytes, Field(ge=4096, le=1 << 32)] | None = Field(
        None, description="bytes of a slot; by default 4 MiB in host memory, 64 MiB in device memory"
    )
