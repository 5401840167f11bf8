"""``transport.options`` of ``transport.name = "ucx"``."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    field_validator,
)

_SETTING = re.compile(r"[A-Z][A-Z0-9_]*")
_BYTES = TypeAdapter(ByteSize)


def size(value: object) -> object:
    """``"4MiB"`` as a number of bytes."""
    if not isinstance(value, str):
        return value
    try:
        return int(_BYTES.validate_python(value))
    except ValidationError:
        raise ValueError("write a number of bytes, or one with a unit, such as 4MiB") from None


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
        for name in value:
            if name.startswith("UCX_"):
                raise ValueError(f"write {name.removeprefix('UCX_')!r}: the prefix UCX_ is added")
            if not _SETTING.fullmatch(name):
                raise ValueError(f"{name!r} is no setting of UCX: they are capital letters, digits and underscores")
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
    slot_bytes: Annotated[int, BeforeValidator(size), Field(ge=4096, le=1 << 32)] | None = Field(
        None, description="bytes of a slot; by default 4 MiB in host memory, 64 MiB in device memory"
    )
