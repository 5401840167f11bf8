"""``kvbaton conformance``: what it passes on, what it says, and how it exits."""

import importlib.util
import json
from pathlib import Path

import pytest

from kvbaton import cuda
from kvbaton.cli.conformance import Order, command

PART = ("-k", "test_a_chunk_ends_once", "--partial", "--level", "connector")


def test_a_part_of_the_suite_with_a_report(kvbaton, tmp_path, capfd):
    result = kvbaton("conformance", "loopback", *PART, "--report", str(tmp_path / "out"))
    assert result.exit_code == 0, capfd.readouterr().out
    assert "NO VERDICT on loopback: a part of the suite passed" in capfd.readouterr().out
    verdict = json.loads((tmp_path / "out" / "conformance.json").read_text())
    assert (verdict["conforms"], verdict["partial"]) == (False, True)
    assert (tmp_path / "out" / "conformance.html").is_file()


def test_a_part_that_passes_is_no_success_unless_it_was_meant(kvbaton, capfd):
    result = kvbaton("conformance", "loopback", *(word for word in PART if word != "--partial"))
    assert result.exit_code == 3, capfd.readouterr().out
    assert "NO VERDICT on loopback: a part of the suite passed" in capfd.readouterr().out
    assert "that was a part of the suite, which is no verdict" in result.stderr


def test_a_selection_that_matches_nothing_is_bad_input(kvbaton, capfd):
    result = kvbaton("conformance", "loopback", "-k", "T99")
    said = capfd.readouterr().out
    assert result.exit_code == 2, said
    assert 'NO VERDICT on loopback, core\'s guard: no standard test matches -k "T99".' in said


def test_a_connector_in_the_folder_it_is_called_from(kvbaton, tmp_path, monkeypatch, capfd):
    (tmp_path / "mine_here.py").write_text("from kvbaton_loopback import plugin\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    result = kvbaton("conformance", "mine_here:plugin", *PART)
    assert result.exit_code == 0, capfd.readouterr().out


def test_options_come_from_the_file_where_it_names_the_same_transport(kvbaton, tmp_path, capfd):
    config = tmp_path / "k.toml"
    config.write_text('[transport]\nname = "loopback"\n[transport.options]\nfail_chunks = [0]\n')
    result = kvbaton("conformance", "--config", str(config), *PART)
    assert result.exit_code == 1
    assert "loopback DOES NOT CONFORM" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nope",), 'no transport "nope"'),
        (("loopback", "--transport-option", "laps=1"), 'has no option "laps"'),
        (("loopback", "--transport-option", "laps"), "write KEY=VALUE"),
        (("loopback", "--level", "engine"), "write connector, handoff or all"),
        (("loopback", "--memory", "disk"), "write host or cuda"),
        (("loopback", "--memory", "cuda"), "moves host memory only, and cuda memory is asked for: write --memory host"),
        (("loopback", "--memory", "cpu"), "--memory cpu: write host\n"),
        (("loopback", "--devices", "0,1"), "--devices 0,1: it goes with --memory cuda"),
        (
            ("loopback", "--memory", "cuda", "--devices", "0,-1"),
            "write numbers of CUDA devices with commas between, such",
        ),
        (("loopback", "--memory", "cuda", "--devices", "one"), '--devices "one": write numbers of CUDA devices'),
        (("loopback", "--memory", "cuda", "--devices", ""), '--devices "": write numbers of CUDA devices'),
        (("loopback", "--partial"), "it goes with -k"),
        ((), "which connector?"),
    ],
)
def test_what_cannot_be_judged_is_one_line(kvbaton, arguments, said):
    result = kvbaton("conformance", *arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_device_that_is_not_there_is_one_line(kvbaton, monkeypatch):
    monkeypatch.setattr("kvbaton.cli.conformance.choose_connector", lambda *chosen: None)
    monkeypatch.setattr(cuda, "library", lambda: object())
    monkeypatch.setattr(cuda.Driver, "count", lambda driver: 1)
    result = kvbaton("conformance", "loopback", "--memory", "cuda", "--devices", "0,1")
    assert result.exit_code == 2
    assert "--devices 0,1: there is no CUDA device 1, because this process sees 1, numbered from 0" in result.stderr
    assert result.stderr.count("\n") == 1


def test_ctrl_c_is_no_verdict_although_the_run_still_writes_one(kvbaton, monkeypatch):
    class Interrupted:
        """pytest, which has ended its tests and written what it had."""

        def __init__(self, command, **_):
            report = Path(command[command.index("--conformance-report") + 1])
            (report / "conformance.json").write_text('{"conforms": false, "tried": 7, "partial": false}')
            self._asked = 0

        def wait(self):
            self._asked += 1
            if self._asked == 1:
                raise KeyboardInterrupt
            return 1

        def terminate(self):
            self.told = True

        kill = terminate

    monkeypatch.setattr("kvbaton.cli.conformance.subprocess.Popen", Interrupted)
    result = kvbaton("conformance", "loopback", *PART)
    assert (result.exit_code, result.stderr) == (130, "kvbaton: interrupted\n")


#: A transport that puts something else in the place of the report's folder.
_IN_ITS_PLACE = """
import shutil
from pathlib import Path
from kvbaton_loopback.plugin import LoopbackPlugin

class Plugin(LoopbackPlugin):
    def open(self, options, context):
        folder = Path({folder!r})
        if folder.is_dir():
            shutil.rmtree(folder)
            folder.touch()
        return super().open(options, context)

plugin = Plugin()
"""


@pytest.mark.parametrize(
    ("where", "reason"),
    [
        ("file", "it is not a directory"),
        ("/proc/r", "No such file or directory"),
        ("mistyped/out", "there is no directory {folder.parent}"),
    ],
)
def test_a_report_that_cannot_be_written_is_told_before_any_test(kvbaton, tmp_path, monkeypatch, where, reason):
    (tmp_path / "file").touch()
    monkeypatch.setattr("kvbaton.cli.conformance.subprocess.Popen", None)
    folder = tmp_path / where
    result = kvbaton("conformance", "loopback", "--report", str(folder))
    assert result.exit_code == 2
    assert result.stderr == f"kvbaton: --report {folder}: it cannot be written: {reason.format(folder=folder)}\n"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_report_that_cannot_be_written_at_the_end_is_told_after_the_verdict(kvbaton, tmp_path, monkeypatch, capfd):
    folder = tmp_path / "out"
    (tmp_path / "in_its_place.py").write_text(_IN_ITS_PLACE.format(folder=str(folder)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    result = kvbaton("conformance", "in_its_place:plugin", *PART, "--report", str(folder))
    out, err = capfd.readouterr()
    assert result.exit_code == 2, out
    verdict, told, *_ = out.partition("NO VERDICT on ")[2].splitlines()
    assert "a part of the suite passed" in verdict
    assert told == f"error: --report {folder}: it cannot be written: Not a directory"
    assert "Traceback" not in out + err + result.stderr


def test_without_the_kit_it_says_how_to_get_it(kvbaton, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "kvbaton_conformance" else real(name, *rest)
    )
    result = kvbaton("conformance", "loopback")
    assert result.exit_code == 2
    assert "pip install kvbaton-conformance" in result.stderr


def test_nothing_of_the_place_it_is_called_from_gets_into_the_run(tmp_path):
    words = command(Order("mine", {"lanes": 2, "name": "x"}, seed=7, require_env=True), tmp_path, 9)
    assert words[words.index("--pyargs") + 1] == "kvbaton_conformance.run"
    assert "--noconftest" in words
    assert words[words.index("-c") + 1] == "/dev/null"
    assert [words[at + 1] for at, word in enumerate(words) if word == "--connector-option"] == ["lanes=2", "name=x"]
    assert words[words.index("--conformance-seed") + 1] == "7"
    assert "--require-env" in words
    assert "--conformance-keep-going" not in words
    assert "--conformance-keep-going" in command(Order("mine", keep_going=True), tmp_path, 9)
    assert "--connector-memory" not in words
    assert "--connector-devices" not in words
    assert "cuda" in command(Order("mine", memory="cuda"), tmp_path, 9)
    words = command(Order("mine", memory="cuda", devices=(0, 1)), tmp_path, 9)
    assert words[words.index("--connector-devices") + 1] == "0,1"
