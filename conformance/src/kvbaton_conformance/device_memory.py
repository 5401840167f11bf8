"""Memory of a CUDA device under a test's eyes.  torch is imported with the first region, and not at all without one.

:func:`window` gives the bytes of any region in the form of a numpy array.  A host region's is one; a device region's
is a :class:`Window`, which copies on every access: reads are plain copies from device to host, behind everything that
this process has queued, and a write has reached the device when it returns.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvbaton.connector import MemoryKind, MemoryRegion

Bytes: TypeAlias = npt.NDArray[np.uint8]

#: torch's name for the kind of device.  The kit's own tests put ``cpu`` here, to try everything but the hardware.
DEVICE = "cuda"


def absent(devices: Iterable[int]) -> str:
    """Why there is no memory of these devices to be had here; empty where there is."""
    try:
        import torch
    except ImportError as error:
        return f"device memory is looked at through torch, which is not here ({error}); pip install torch"
    if DEVICE == "cuda" and not torch.cuda.is_available():
        return "torch sees no CUDA device"
    count = torch.cuda.device_count() if DEVICE == "cuda" else None
    if count is not None and (beyond := [str(device) for device in devices if device >= count]):
        return (
            f"there is no CUDA device {' and no '.join(dict.fromkeys(beyond))}: torch sees {count}, numbered from 0;"
            " name others, or let CUDA_VISIBLE_DEVICES show more"
        )
    return ""


def allocate(id: int, kind: MemoryKind, device: int, nbytes: int) -> MemoryRegion:
    """A new zeroed region on the host or on CUDA device ``device``; its owner is the array or the tensor."""
    if kind == "host":
        return MemoryRegion.of_array(id, np.zeros(nbytes, np.uint8))
    import torch

    tensor = torch.zeros(nbytes, dtype=torch.uint8, device=_place(device))
    _settle(tensor)
    return MemoryRegion(id, kind, device, tensor.data_ptr(), nbytes, tensor)


def window(region: MemoryRegion) -> Any:
    """The bytes of ``region``, shared: an array on the host, a :class:`Window` on a device."""
    return region.view() if region.kind == "host" else Window(_tensor(region))


class Window:
    """Bytes on a device in the manner of a one-dimensional numpy array: slices are shared, all else is a copy."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def __len__(self) -> int:
        return int(self._tensor.numel())

    @property
    def size(self) -> int:
        return len(self)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        array: npt.NDArray[Any] = self._tensor.to("cpu", copy=True).numpy()
        return array if dtype is None else array.astype(dtype)

    def __getitem__(self, where: Any) -> Any:
        """A slice is a :class:`Window`; anything else is read."""
        return Window(self._tensor[where]) if isinstance(where, slice) else np.asarray(self)[where]

    def __setitem__(self, where: Any, value: Any) -> None:
        import torch

        new = torch.from_numpy(np.array(value, np.uint8)).to(self._tensor.device)
        if isinstance(where, np.ndarray):
            where = torch.from_numpy(where).to(self._tensor.device)
        self._tensor[where] = new
        _settle(self._tensor)

    def __eq__(self, other: object) -> Any:
        return np.asarray(self) == np.asarray(other)

    def __ne__(self, other: object) -> Any:
        return np.asarray(self) != np.asarray(other)

    __hash__ = None  # type: ignore[assignment]

    def copy(self) -> Bytes:
        return np.array(self)

    def reshape(self, *shape: int) -> Bytes:
        return np.asarray(self).reshape(*shape)

    def any(self) -> bool:
        return bool(np.asarray(self).any())

    def tobytes(self) -> bytes:
        return np.asarray(self).tobytes()


class _Exposed:
    """A region's memory in the form that torch reads; whoever reads it keeps the region alive."""

    def __init__(self, region: MemoryRegion) -> None:
        self._region = region
        self.__cuda_array_interface__ = {
            "shape": (region.length,), "typestr": "|u1", "data": (region.address, False), "version": 3
        }  # fmt: skip


def _tensor(region: MemoryRegion) -> Any:
    import torch

    if isinstance(region.owner, torch.Tensor) and region.owner.dtype is torch.uint8:
        return region.owner.view(-1)
    if DEVICE == "cpu":
        buffer = MemoryRegion(region.id, "host", 0, region.address, region.length, region.owner).view()
        return torch.from_numpy(buffer)
    return torch.as_tensor(_Exposed(region), device=_place(region.device))


def _place(device: int) -> str:
    return f"{DEVICE}:{device}" if DEVICE == "cuda" else DEVICE


def _settle(tensor: Any) -> None:
    """Wait until what was queued for the device is done: nobody else is ordered behind our stream."""
    import torch

    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
