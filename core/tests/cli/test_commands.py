"""``kvbaton plugins``, ``kvbaton config``, and the console script itself."""

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from pydantic import BaseModel, Field

from kvbaton import plugins
from kvbaton.connector import Capabilities
from kvbaton.plugins import PluginRow

ROWS = [
    PluginRow("connector", "loopback", "kvbaton-loopback", "0.1.0", True, capabilities=Capabilities(same_process=True),
              options={"seed": {"type": "integer"}}),
    PluginRow("connector", "broken", "broken-dist", "3", False, "is broken: [red]ImportError[/]", "reinstall it"),
    PluginRow("engine", "transformers", "kvbaton-transformers", "0.1.0", True),
]  # fmt: skip


@pytest.fixture
def listed(monkeypatch):
    monkeypatch.setattr(plugins, "list_plugins", lambda: ROWS)


def test_plugins_lists_version_distribution_availability_and_reason(kvbaton, listed):
    result = kvbaton("plugins")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["kind", "name", "distribution", "version", "available", "reason"]
    assert lines[1].split() == ["connector", "loopback", "kvbaton-loopback", "0.1.0", "yes"]
    assert lines[2].endswith("no         is broken: [red]ImportError[/]: reinstall it")


def test_plugins_as_json(kvbaton, listed):
    rows = json.loads(kvbaton("plugins", "--json").stdout)
    assert [(row["name"], row["available"]) for row in rows] == [
        ("loopback", True), ("broken", False), ("transformers", True),
    ]  # fmt: skip
    assert rows[0]["capabilities"]["memory_kinds"] == ["host"]
    assert rows[0]["options"] == {"seed": {"type": "integer"}}


def test_no_plugin_at_all(kvbaton, monkeypatch):
    monkeypatch.setattr(plugins, "list_plugins", list)
    assert "pip install kvbaton-loopback kvbaton-transformers" in kvbaton("plugins").stdout


def test_config_says_where_each_value_came_from(kvbaton, tmp_path, monkeypatch):
    path = tmp_path / "k.toml"
    path.write_text('model = "[m]"\n\n[transfer]\nchunk_bytes = "1MiB"\n')
    monkeypatch.setenv("KVBATON_LIMITS__WAITING", "7")
    result = kvbaton("config", "--config", str(path), "--transport", "loopback", "--set", "deadline.chunk=5")
    assert result.exit_code == 0, result.output
    rows = {line.split()[0]: line.strip().split(maxsplit=2)[1:] for line in result.stdout.splitlines()[1:]}
    assert rows["model"] == ["[m]", f"{path}:1"]
    assert rows["transfer.chunk_bytes"] == ["1048576", f"{path}:4"]
    assert rows["limits.waiting"] == ["7", "KVBATON_LIMITS__WAITING"]
    assert rows["transport.name"] == ["loopback", "--transport"]
    assert rows["deadline.chunk"] == ["5.0", "--set"]
    assert rows["deadline.drain"] == ["60.0", "default"]


def test_config_works_without_a_model(kvbaton):
    assert "(not set)" in kvbaton("config").stdout
    listing = json.loads(kvbaton("config", "--json").stdout)
    assert listing["model"]["value"] is None
    assert listing["transfer.chunk_bytes"]["value"] == 64 << 20
    assert listing["transfer.chunk_bytes"]["from"] == "default"
    assert listing["transfer.chunk_bytes"]["description"].startswith("Largest chunk.")


def test_config_shows_what_the_chosen_plugins_take_by_default(kvbaton, monkeypatch):
    class Options(BaseModel):
        block_tokens: int = Field(16, description="Tokens per block.")
        dtype: str = "float32"

    monkeypatch.setattr(
        plugins, "options_of", lambda settings, group: Options(dtype="half") if group == "engine" else None
    )
    listing = json.loads(kvbaton("config", "--engine-option", "dtype=half", "--json").stdout)
    assert listing["engine.options.block_tokens"] == {
        "value": 16, "from": "default", "description": "Tokens per block.",
    }  # fmt: skip
    assert (listing["engine.options.dtype"]["value"], listing["engine.options.dtype"]["from"]) == (
        "half", "--engine-option",
    )  # fmt: skip
    assert "engine.options" not in listing
    keys = list(listing)
    assert keys.index("engine.options.block_tokens") < keys.index("transport.name") < keys.index("stages.prefill")


def test_config_of_a_plugin_that_is_not_there_is_shown_all_the_same(kvbaton):
    result = kvbaton("config", "--transport", "nope", "--transport-option", "a=1")
    assert result.exit_code == 2, "what was asked for cannot be had"
    assert 'transport.options are shown as given: no transport "nope"' in result.stderr
    assert "transport.options.a" in result.stdout


def test_config_schema(kvbaton):
    assert "transfer" in json.loads(kvbaton("config", "--schema").stdout)["properties"]


def test_config_with_nonsense(kvbaton):
    result = kvbaton("config", "--set", "transprt.name=x")
    assert result.exit_code == 2
    assert result.stderr.startswith('kvbaton: --set: no setting "transprt". Did you mean "transport"?')


# -- the console script, as a process ----------------------------------------------------------------------------------


def kvbaton_process(*arguments: str, before: str = "") -> subprocess.CompletedProcess[str]:
    program = f"{before}\nfrom kvbaton.cli import main\nmain()"
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_an_unknown_command_is_bad_input():
    done = kvbaton_process("sever")
    assert done.returncode == 2
    assert "sever" in done.stderr
    assert done.stdout == ""


def test_without_the_extra_it_says_how_to_install_it():
    done = kvbaton_process("plugins", before="import sys; sys.modules['typer'] = None")
    assert done.returncode == 2
    assert done.stderr == (
        "kvbaton: the command line needs typer, which is not installed: pip install 'kvbaton[cli]'\n"
    )


def test_bad_configuration_exits_2_without_a_traceback():
    done = kvbaton_process("config", "--prefill", "0")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == 'kvbaton: --prefill: stages.prefill = "0": must be at least 1\n'


def test_help_is_quick():
    """The help must not load numpy, an engine or a transport."""
    done = kvbaton_process(
        "run", "--help",
        before="import atexit, sys\n"
        "heavy = {'torch', 'transformers', 'stevedore', 'zmq', 'numpy'}\n"
        "atexit.register(lambda: print(sorted(heavy & set(sys.modules))))",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
    assert "--compare" in done.stdout


def test_a_reader_that_goes_away_is_no_error(process):
    child = process("run", "--model", "m", *[part for n in range(200) for part in ("--prompt", f"w{n} v{n}")])
    assert child.stdout is not None
    child.stdout.close()
    child.stdout = None
    _, errors = child.communicate(timeout=60)
    assert errors == ""
    assert child.returncode == 1


@pytest.mark.parametrize(
    "command",
    [("run", "--model", "m", "--prompt", "a b"), ("run", "--model", "m", "--prompt", "a b", "--json"), ("config",),
     ("config", "--schema"), ("run", "--help")],
)  # fmt: skip
def test_an_answer_that_cannot_be_written_is_one_line_and_a_status(process, command):
    with Path("/dev/full").open("w") as full:
        child = process(*command, stdout=full)
        _, errors = child.communicate(timeout=60)
    lines = [line for line in errors.splitlines() if "options are shown as given" not in line]
    assert lines == ["kvbaton: the answer cannot be written to stdout: No space left on device"]
    assert child.returncode == 1


def test_without_stdout_it_says_so(process):
    child = process("config", preexec_fn=lambda: os.close(1))
    _, errors = child.communicate(timeout=60)
    assert errors == "kvbaton: stdout is closed: there is nowhere to write the answer\n"
    assert child.returncode == 1


def test_a_failure_of_another_file_is_not_taken_for_one_of_stdout(process):
    child = process("config", "--schema", program=(
        "import errno, kvbaton.cli.app as app\n"
        "def fail(*a): raise OSError(errno.ENOSPC, 'No space left on device')\n"
        "app.Settings.model_json_schema = fail\n"
        "from kvbaton.cli import main; main()"
    ))  # fmt: skip
    _, errors = child.communicate(timeout=60)
    assert errors.startswith("Traceback")
    assert child.returncode == 1


def test_a_terminal_that_cannot_show_a_character_is_no_error(process):
    child = process("run", "--model", "m", "--prompt", "héllo wörld", env={**os.environ, "PYTHONIOENCODING": "ascii"})
    out, errors = child.communicate(timeout=60)
    assert (child.returncode, errors) == (0, "")
    assert out.startswith("w?rld h?llo\n")


def test_the_program_is_where_the_script_points():
    (script,) = entry_points(group="console_scripts", name="kvbaton")
    assert script.value == "kvbaton.cli:main"
