"""kvbaton between stages of one host: UCX, and CUDA IPC mappings that UCX wires up.

Modules: :mod:`~kvbaton_cuda_ipc.library` loads ucxx and says why not, :mod:`~kvbaton_cuda_ipc.wire` connects stages and
carries messages between them, :mod:`~kvbaton_cuda_ipc.words` is how they greet each other.  Importing this package
loads no native library.

Of the transport ``ucx``: :mod:`~kvbaton_cuda_ipc.ucx` is the promise, :mod:`~kvbaton_cuda_ipc.parts` is what its ends
tell each other, :mod:`~kvbaton_cuda_ipc.staging` is where bytes wait, and how they get there, and
:mod:`~kvbaton_cuda_ipc.grants` says who may write what.

Of the transport ``cuda_ipc``: :mod:`~kvbaton_cuda_ipc.ipc` is the promise, :mod:`~kvbaton_cuda_ipc.mapping` opens one
process's memory to another by way of CUDA's :mod:`~kvbaton_cuda_ipc.driver`, :mod:`~kvbaton_cuda_ipc.mover` starts
what moves :mod:`~kvbaton_cuda_ipc.runs` of bytes, of which :mod:`~kvbaton_cuda_ipc.scatter` is the kernel, which
:mod:`~kvbaton_cuda_ipc.kernels` compiles, proves and launches, :mod:`~kvbaton_cuda_ipc.counters` say what has come, and
:mod:`~kvbaton_cuda_ipc.ipc_words` is what its ends tell each other.
"""

from __future__ import annotations

from kvbaton_cuda_ipc.ipc_plugin import IpcPlugin
from kvbaton_cuda_ipc.plugin import UcxPlugin

#: The objects behind the entry points ``cuda_ipc`` and ``ucx`` of the group ``kvbaton.connectors``.
cuda_ipc = IpcPlugin()
ucx_plugin = UcxPlugin()

__all__ = ["IpcPlugin", "UcxPlugin", "cuda_ipc", "ucx_plugin"]
