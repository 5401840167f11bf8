"""Two copies of UCX in one process hang; the plugin for NIXL must be installed to see it."""

import subprocess
import sys

import pytest


@pytest.mark.clause("T13")
@pytest.mark.parametrize("first", ["nixl", "ucxx"])
def test_it_is_not_loaded_beside_nixl(first):
    """In both directions, each in a process of its own."""
    code = {
        "nixl": "from kvbaton_nixl import library; library.load('FATAL')\n"
        "from kvbaton_cuda_ipc import library\nassert 'NIXL' in library.missing(), library.missing()\n"
        "try: library.load()\nexcept Exception as error: print(error)",
        "ucxx": "from kvbaton_cuda_ipc import library; library.load()\nassert not library.missing()\n"
        "from kvbaton_nixl import library\n"
        "try: library.load('FATAL')\nexcept Exception as error: print(error)",
    }[first]
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "two of them hang" in done.stdout
