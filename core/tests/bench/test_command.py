"""``kvbaton bench``, as a user has it."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

SMALL = ("--like", "smollm2-135m", "--tokens", "32", "--seconds", "0.3", "--requests", "5")
#: The folder of a transport that can be broken.
FAULTY = Path(__file__).parents[1] / "pair"


@pytest.fixture
def kvbaton(monkeypatch):
    for name in [name for name in os.environ if name.upper().startswith("KVBATON_")]:
        monkeypatch.delenv(name)
    from kvbaton.cli.app import app

    return lambda *arguments: CliRunner().invoke(app, ["bench", *arguments])


def test_everything_at_once_within_eighty_columns_and_as_a_picture(kvbaton, tmp_path):
    picture = tmp_path / "found.svg"
    result = kvbaton("loopback", *SMALL, "--plot", str(picture))
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == "smollm2-135m: 30 layers, 3 KV heads of 64, bfloat16"
    assert lines[1].startswith("32 tokens, scattered blocks of 16, layout block: 5 segments, ")
    for word in ("transport, one process", "whole hand-offs, stages as threads", "their rate / the transport's"):
        assert word in result.stdout
    assert [line.split()[0] for line in lines if line.startswith("received ")] == ["received"]
    drawn = picture.read_text()
    assert "<svg" in drawn
    assert "loopback, host memory: smollm2-135m" in drawn


def test_what_was_measured_is_told_although_it_cannot_be_drawn(kvbaton, monkeypatch, tmp_path):
    from kvbaton.cli import bench

    (folder := tmp_path / "gone").mkdir()
    carry_out = bench.carry_out
    monkeypatch.setattr(bench, "carry_out", lambda *how: (carry_out(*how), folder.rmdir())[0])
    result = kvbaton("loopback", *SMALL, "--part", "transport", "--plot", str(folder / "found.svg"))
    assert result.exit_code == 2
    assert "it cannot be written" in result.stderr
    assert result.stdout.startswith("smollm2-135m: 30 layers")


def test_it_writes_no_trace_where_a_deployment_does(kvbaton, tmp_path):
    (tmp_path / "trace.json").write_text("theirs")
    result = kvbaton("loopback", *SMALL, "--part", "handoff", "--set", f"trace.path={tmp_path / 'trace.json'}")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "trace.json").read_text() == "theirs"


def test_json_has_the_same_in_base_units(kvbaton, tmp_path):
    result = kvbaton(
        "loopback", *SMALL, "--json", "--at-once", "2", "--chunk-bytes", "100KiB", "--layout", "layer", "--contiguous"
    )
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["schema"] == 1
    assert found["traffic"]["chunk_bytes"] == 102400
    assert found["traffic"]["scattered"] is False
    assert found["moved"]["bytes"] == found["handoffs"]["bytes"] == found["traffic"]["bytes"]
    assert found["moved"]["chunks"] == found["handoffs"]["chunks"] > 1
    assert found["moved"]["baseline"] is None
    assert found["handoffs"]["latency"]["count"] <= 5
    assert found["handoffs"]["at_once"] == 2
    assert 0 < found["handoffs"]["milestones"]["received"]["median"] < 5


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("loopbck",), 'Did you mean "loopback"'),
        (("loopback", "--like", "lama-8b"), 'Did you mean "llama-8b"'),
        (("loopback", "--tokens", "100"), "take 96 or 112 tokens"),
        (("loopback", "--tokens", "many"), "--tokens many: write a whole number"),
        (("loopback", "--tokens", "9" * 5000), "999: write a whole number"),
        (("loopback", "--tokens", "9" * 400), "999: write a whole number"),
        (("loopback", *SMALL, "--chunk-bytes", "1"), "Take a larger --chunk-bytes"),
        (
            ("loopback", "--layers", "4", "--kv-heads", "1", "--head-dim", "1", "--tokens", "4000000", "--block", "1"),
            "Take a larger --block",
        ),
        (("loopback", *SMALL, "--plot", "/proc/found.svg"), "it cannot be written"),
        (("loopback", "--seconds", "0"), "--seconds 0: write a number above 0 and up to 86400, without a unit"),
        (("loopback", "--seconds", "10s"), "without a unit"),
        (("loopback", "--requests", "0"), "at least 1; --part transport leaves hand-offs out"),
        (("loopback", "--layout", "layers"), 'write block or layer. Did you mean "layer"'),
        (("loopback", "--memory", "tape"), "write host or cuda"),
        (("loopback", "--memory", "cpu"), "--memory cpu: write host\n"),
        (("loopback", "--memory", "cuda"), "host memory only, and cuda memory is asked for: write --memory host or"),
        (("loopback", "--part", "some"), "write all, transport or handoff"),
        (("loopback", "--layers", "3"), "--kv-heads, --head-dim: needed as well"),
        (("loopback", "--plot", "found.pdf"), "ends in .svg or .png"),
        (("loopback", "--plot", "nowhere/found.svg"), "there is no folder nowhere"),
        (("loopback", "--chunk-bytes", "big"), "not a size in bytes"),
        (("loopback", "--transport-option", "speed=9"), 'has no option "speed"'),
        (("loopback", "--like", "llama-405b", "--tokens", "16777216"), "Nothing was allocated. Take fewer --tokens"),
        (("loopback", *SMALL, "--part", "handoff", "--at-once", "9999999"), "or fewer --at-once"),
    ],
)
def test_bad_input_is_one_line_and_status_2(kvbaton, arguments, says):
    result = kvbaton(*arguments)
    assert result.exit_code == 2, result.output
    assert says in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not result.stdout


@pytest.mark.parametrize(
    ("part", "fault", "says"),
    [
        ("transport", "corrupt", r"kvbaton: T3: prefill-0 to decode-0: 1 of \d+ bytes are wrong"),
        ("handoff", "corrupt", r"kvbaton: .*T3: of the first hand-off into place 0, 1 bytes are wrong"),
        ("transport", "die", r"kvbaton: prefill-0: its process died in sending"),
    ],
)
def test_a_transport_that_fails_is_status_1_and_said(kvbaton, monkeypatch, part, fault, says):
    monkeypatch.syspath_prepend(str(FAULTY))
    result = kvbaton(
        "datagram_transport:plugin", *SMALL, "--transport-option", f"fault={fault}", "--part", part, "--at-once", "1"
    )
    assert result.exit_code == 1, result.output
    assert re.search(says, result.stderr), result.stderr
    assert not result.stdout


def test_drawing_without_matplotlib_names_the_extra(kvbaton, monkeypatch):
    import importlib.util

    from kvbaton.bench import picture

    find = importlib.util.find_spec
    monkeypatch.setattr(
        picture.importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name)
    )  # fmt: skip
    result = kvbaton("loopback", "--plot", "found.svg")
    assert result.exit_code == 2
    assert "pip install 'kvbaton[plot]'" in result.stderr


@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    ("part", "fault"), [("transport", "hang"), ("transport", "no receipt"), ("handoff", "no receipt")]
)
def test_ctrl_c_leaves_no_process(part, fault, tmp_path):
    reached = tmp_path / "reached"
    program = "from kvbaton.cli import main; main()"
    child = subprocess.Popen(
        [sys.executable, "-c", program, "bench", "datagram_transport:plugin", *SMALL, "--part", part, "--seconds", "60",
         "--transport-option", f"fault={fault}", "--transport-option", f"reached={reached}"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join((str(FAULTY), *sys.path))},
    )  # fmt: skip
    try:
        here = psutil.Process(child.pid)
        with child:
            while not reached.exists() and child.poll() is None:  # the test's own timeout bounds it
                threading.Event().wait(0.02)
            ends = here.children(recursive=True)
            child.send_signal(signal.SIGINT)
            _, errors = child.communicate(timeout=60)
    finally:
        child.kill()
    assert child.returncode == 130, errors
    assert errors == "kvbaton: interrupted\n"
    assert len(ends) == 2
    _, left = psutil.wait_procs(ends, timeout=40)
    assert not left
