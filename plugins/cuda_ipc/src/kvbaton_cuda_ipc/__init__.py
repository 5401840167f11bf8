"""kvbaton between stages of one host: UCX, and CUDA IPC mappings that UCX wires up.

Modules: :mod:`~kvbaton_cuda_ipc.library` loads ucxx and says why not, :mod:`~kvbaton_cuda_ipc.wire` connects stages and
carries messages between them, :mod:`~kvbaton_cuda_ipc.words` is how they greet each other.  Importing this package
loads no native library.
"""

from __future__ import annotations
