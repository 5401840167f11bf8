"""What figures need to be read, as one line says it."""

from __future__ import annotations

import pytest

from kvbaton.bench.circumstances import in_words, machine


@pytest.mark.parametrize(
    ("gpus", "cuda", "says"),
    [
        ([], "", "Xeon, 2 cores"),
        # a driver that sees no device
        ([], "13.0", "Xeon, 2 cores"),
        (["H200"], "13.0", "Xeon, 2 cores, 1 x H200, CUDA 13.0"),
        (["H200", "L4", "H200"], "", "Xeon, 2 cores, 2 x H200, 1 x L4"),
    ],
)
def test_gpus_are_counted_by_model(gpus, cuda, says):
    assert in_words({"cpu": "Xeon", "cores": 2, "gpus": gpus, "cuda": cuda}) == says


def test_this_machine_has_what_the_line_needs():
    assert " cores" in in_words(machine())
