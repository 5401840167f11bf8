"""Every process that has this folder on its path: device memory is torch's, on the host."""

from kvbaton_conformance import device_memory

device_memory.DEVICE = "cpu"
