"""NIXL's own API beside kvbaton, as ``kvbaton bench`` sets it."""

import json
import subprocess
import sys

import pytest


@pytest.mark.parametrize("options", [(), ("--transport-option", "packing=never")], ids=["auto", "never"])
def test_it_moves_the_same_bytes_and_both_are_timed(options):
    program = "from kvbaton.cli import main; main()"
    ran = subprocess.run(
        [
            sys.executable, "-c", program, "bench", "nixl", "--part", "transport", "--like", "smollm2-135m", "--tokens",
            "64", "--layout", "layer", "--chunk-bytes", "512KiB", "--seconds", "0.5", "--json", *options,
        ],
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    moved = found["moved"]
    assert found["notes"] == []
    assert (moved["reach"], moved["chunks"]) == ("cross_process", 3)
    assert moved["baseline"]["name"] == "NIXL's own API"
    assert moved["of_baseline"]["count"] == moved["baseline"]["rate"]["count"] == moved["rate"]["count"]
    assert all(moved[name]["median"] > 0 for name in ("rate", "of_baseline", "of_copy", "submit", "chunk_latency"))
