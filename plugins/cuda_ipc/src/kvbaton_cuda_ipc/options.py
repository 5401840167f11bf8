"""``transport.options`` of ``transport.name = "ucx"``."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from kvbaton.byte_size import InBytes
from kvbaton.ucx import check_names

#: Devices of UCX that are no interfaces of the system: named as here, and with a port, as in mlx5_0:1.
_INFINIBAND: Final = Path("/sys/class/infiniband")


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

    @field_validator("interface")
    @classmethod
    def _there(cls, value: str) -> str:
        check_interfaces(value)
        return value

    @field_validator("ucx")
    @classmethod
    def _names(cls, value: dict[str, str]) -> dict[str, str]:
        check_names(value)
        check_interfaces(value.get("NET_DEVICES", "all"))
        return value

    def settings(self) -> dict[str, str]:
        """For UCX's context."""
        # larger pieces cost a third less of the processor
        return {"NET_DEVICES": self.interface, "TCP_TX_SEG_SIZE": "256k", "TCP_RX_SEG_SIZE": "256k", **self.ucx}


def check_interfaces(devices: str) -> None:
    """Raises ``ValueError`` where this host certainly has none of UCX's ``devices``: UCX itself would find out only
    once it cannot connect.

    Not of what may be more than the name of an interface: ``all``, ``mlx5_0:1``, ``^eth0``.
    """
    try:
        there = [name for _, name in socket.if_nameindex()]
        also = [path.name for path in _INFINIBAND.iterdir()] if _INFINIBAND.is_dir() else []
    except OSError:
        return
    names = devices.split(",")
    if there and all(re.fullmatch(r"[\w.-]+", name) and name not in ("all", *there, *also) for name in names):
        missing = " or ".join(f'"{name}"' for name in names)
        raise ValueError(f"no interface {missing}; there are {', '.join(there)}")


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
