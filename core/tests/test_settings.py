"""Settings: three sources, one model, and what an operator is told when something is wrong."""

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from kvbaton.bounds import Deadlines, GuardLimits, Limits
from kvbaton.control.zmq import ZmqCoordinatorChannels
from kvbaton.errors import SettingsError
from kvbaton.guard import GuardedConnector
from kvbaton.settings import DeadlineSettings, LimitsSettings, Settings, TransferSettings, describe, load


def fault(*args: object, **kwargs: object) -> SettingsError:
    with pytest.raises(SettingsError) as caught:
        load(*args, **kwargs)
    return caught.value


@pytest.fixture
def toml(tmp_path: Path):
    def write(text: str) -> Path:
        path = tmp_path / "kvbaton.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


# -- merging -----------------------------------------------------------------------------------------------------------


def test_each_source_overrules_the_one_before_and_every_value_says_where_it_came_from(toml):
    path = toml(
        'model = "from-file"\n\n[transfer]\nchunk_bytes = "1MiB"\nchunk_segments = 10\nunreceipted_chunks = 7\n'
    )

    settings, origin = load(
        path,
        {"transfer.chunk_bytes": "3MiB"},
        {"KVBATON_TRANSFER__CHUNK_BYTES": "2MiB", "KVBATON_TRANSFER__CHUNK_SEGMENTS": "20", "HOME": "/"},
        flags={"transfer.chunk_bytes": "--set"},
        defaults={"model": "from-application", "limits": {"waiting": 5}},
    )

    assert settings.model == "from-file"
    assert settings.transfer.chunk_bytes == 3 << 20
    assert settings.transfer.chunk_segments == 20
    assert settings.transfer.unreceipted_chunks == 7
    assert settings.limits.waiting == 5
    assert str(origin["model"]) == f"{path}:1"
    assert str(origin["transfer.chunk_bytes"]) == "--set"
    assert str(origin["transfer.chunk_segments"]) == "KVBATON_TRANSFER__CHUNK_SEGMENTS"
    assert str(origin["transfer.unreceipted_chunks"]) == f"{path}:6"
    assert str(origin["deadline.chunk"]) == "default"


def test_provenance_has_every_effective_value_and_no_other():
    settings, origin = load(None, {"model": "m", "transport.options": {"a": {"b": 1}, "c": 2}})

    def leaves(tree, prefix=""):
        for key, value in tree.items():
            if isinstance(value, dict) and value:
                yield from leaves(value, f"{prefix}{key}.")
            else:
                yield prefix + key

    assert set(origin) == set(leaves(settings.model_dump()))
    assert str(origin["transport.options.a.b"]) == "command line"


def test_overrides_may_be_nested_or_dotted():
    nested, _ = load(None, {"model": "m", "stages": {"prefill": 2, "decode": 3}})
    dotted, _ = load(None, {"model": "m", "stages.prefill": 2, "stages.decode": 3})
    assert nested == dotted


def test_options_are_merged_key_by_key(toml):
    path = toml('model="m"\n[transport]\nname="a"\n[transport.options]\nx=1\ny=2\n')
    settings, _ = load(path, {"transport.options.y": 3}, {"KVBATON_TRANSPORT__OPTIONS__Z": "4"})
    assert settings.transport.options == {"x": 1, "y": 3, "z": "4"}  # the plugin's own model makes a number of it


def test_a_value_replaces_what_lies_below_and_above_it(toml):
    path = toml('model="m"\n[transport]\nname="a"\n[transport.options]\nx={y=1, z=2}\nw=3\n')
    cleared, _ = load(path, {"transport.options": {}})
    assert cleared.transport.options == {}
    scalar, _ = load(path, {"transport.options.x": 5})
    assert scalar.transport.options == {"x": 5, "w": 3}
    table, _ = load(path, {"transport.options.w.deep": 6})
    assert table.transport.options == {"x": {"y": 1, "z": 2}, "w": {"deep": 6}}


def test_options_of_another_plugin_are_not_carried_over(toml):
    path = toml('model="m"\n[transport]\nname="a"\n[transport.options]\nx=1\n')
    settings, _ = load(path, {"transport.name": "b", "transport.options.y": 3})
    assert settings.transport.options == {"y": 3}
    same, _ = load(path, {"transport.name": "a"})
    assert same.transport.options == {"x": 1}


def test_a_table_may_come_from_one_variable_and_single_values_from_others():
    settings, origin = load(
        None,
        {"model": "m"},
        {"KVBATON_TRANSFER": '{"chunk_bytes": "1MiB", "chunk_segments": 5}', "KVBATON_TRANSFER__CHUNK_SEGMENTS": "6"},
    )
    assert settings.transfer.chunk_bytes == 1 << 20
    assert settings.transfer.chunk_segments == 6
    assert str(origin["transfer.chunk_bytes"]) == "KVBATON_TRANSFER"
    assert str(origin["transfer.chunk_segments"]) == "KVBATON_TRANSFER__CHUNK_SEGMENTS"


def test_a_json_file_is_read_too(tmp_path):
    path = tmp_path / "kvbaton.json"
    path.write_text('{"model": "m", "stages": {"decode": 4}}')
    settings, origin = load(path)
    assert settings.stages.decode == 4
    assert str(origin["stages.decode"]) == str(path)


# -- values ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "size"), [("4096", 4096), (4097, 4097), ("64MiB", 64 << 20), ("1.5 GB", 1_500_000_000), ("8k", 8000)]
)
def test_sizes_take_units(written, size):
    settings, _ = load(None, {"model": "m", "control.max_message": written})
    assert settings.control.max_message == size


@pytest.mark.parametrize("written", ["12 parsec", "many", "0", -1, "-5", True, "1MiB2", "5.MiB", "5. MiB", "5."])
def test_nonsense_sizes_are_refused(written):
    error = fault(None, {"model": "m", "control.max_message": written})
    assert "control.max_message" in str(error)
    assert "byte" in str(error)


def test_devices_are_one_per_stage():
    settings, _ = load(None, {"model": "m", "stages.devices": "0,1"})
    assert settings.stages.devices == (0, 1)
    assert "1 entries for 2 stages" in str(fault(None, {"model": "m", "stages.devices": [0]}))
    assert "stages.devices" in str(fault(None, {"model": "m", "stages.devices": "0,-1"}))
    assert "stages.devices" in str(fault(None, {"model": "m", "stages.devices": "0,gpu"}))


@pytest.mark.parametrize("said", ["cpu,cpu", "cpu", ["cpu", "host"], "none", "", []])
def test_whoever_writes_the_cpu_for_a_device_is_told_how_to_say_host_memory(said):
    told = str(fault(None, {"model": "m", "stages.devices": said}))
    assert "stages.devices" in told
    assert ": must be numbers of CUDA devices, such as 0,1; for host memory leave stages.devices out altogether" in told
    assert "more)" not in told


def test_a_framework_s_name_for_a_device_is_told_as_its_number():
    assert ": must be numbers of CUDA devices: write 0,1" in str(
        fault(None, {"model": "m", "stages.devices": "cuda:0,GPU1"})
    )


def test_a_chunk_that_could_never_be_sent_is_refused():
    error = fault(None, {"model": "m", "transfer.inflight_bytes": "1MiB"})
    assert "chunk_bytes (67108864) is larger than inflight_bytes (1048576)" in str(error)


def test_settings_are_frozen_and_survive_the_way_to_a_stage(tmp_path):
    settings, _ = load(
        None,
        {
            "model": "m",
            "control.dir": str(tmp_path),
            "transport.options": {"a": [1, {"b": None}]},
            "stages.devices": "0,1",
        },
    )
    assert Settings.model_validate_json(settings.model_dump_json()) == settings
    with pytest.raises(ValidationError):
        settings.model = "other"
    with pytest.raises(ValidationError):
        settings.transfer.chunk_bytes = 1


def test_the_way_to_a_stage_does_not_look_at_the_environment(monkeypatch):
    settings, _ = load(None, {"model": "m"})
    monkeypatch.setenv("KVBATON_MODEL", "other")
    monkeypatch.setenv("KVBATON_TRANSPORT__OPTIONS__X", "1")
    assert Settings.model_validate_json(settings.model_dump_json()) == settings


# -- what an operator is told ------------------------------------------------------------------------------------------


def test_a_missing_model_says_the_three_ways_to_give_it():
    assert (
        str(fault())
        == "model is not set. Give --model, set KVBATON_MODEL, or write `model = ...` in a configuration file."
    )


def test_an_unknown_key_in_a_file_names_file_line_and_closest_match(toml):
    path = toml('model = "m"\n[transfer]\n# a comment\nchunk_bites = 3\n')
    error = fault(path)
    assert str(error).startswith(f'{path}:4: no setting "transfer.chunk_bites". Did you mean "chunk_bytes"?')
    assert error.key == "transfer.chunk_bites"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("modle = 1", 1),
        ('model="m"\n\n[trnsport]\nname="x"', 3),
        ('model="m"\n\n[trnsport.options]\n\nname="x"', 3),
        ('model="m"\ntrnsport.name="x"', 2),
        ('model="m"\ntransfer.chunk_bites = 1', 2),
        ('model="m"\n[transfer]\n"chunk_bites" = 1', 3),
        ('model="m"\n[[stages]]\n', 0),
    ],
)
def test_the_line_is_found_in_every_spelling(toml, text, line):
    path = toml(text)
    assert str(fault(path)).startswith(f"{path}:{line}: " if line else f"{path}")


def test_an_unknown_variable_names_itself_and_the_closest_match():
    error = fault(None, {"model": "m"}, {"KVBATON_TRANSFR__CHUNK_BYTES": "1"})
    assert str(error).startswith('KVBATON_TRANSFR__CHUNK_BYTES: no setting "transfr". Did you mean "transfer"?')
    error = fault(None, {"model": "m"}, {"KVBATON_TRANSFER__CHUNK_BITES": "1"})
    assert str(error).startswith('KVBATON_TRANSFER__CHUNK_BITES: no setting "transfer.chunk_bites". Did you mean')
    error = fault(None, {"model": "m"}, {"KVBATON_TRANSFER_CHUNK_BYTES": "1"})
    assert str(error) == (
        'KVBATON_TRANSFER_CHUNK_BYTES: no setting "transfer_chunk_bytes". Did you mean KVBATON_TRANSFER__CHUNK_BYTES?'
        " Two underscores stand between the names."
    )


def test_an_unknown_flag_key_is_refused():
    error = fault(None, {"model": "m", "stages.prefil": 1}, flags={"stages.prefil": "--set"})
    assert str(error).startswith('--set: no setting "stages.prefil". Did you mean "prefill"?')
    assert "is not a dotted key" in str(fault(None, {"model": "m", "stages..x": 1}))


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("stages.prefill", "two", "must be a whole number"),
        ("stages.prefill", "1.5", "must be a whole number"),
        ("stages.prefill", 0, "must be at least 1"),
        ("deadline.chunk", "soon", "must be a number"),
        ("deadline.chunk", 0, "must be greater than 0, and no deadline can be switched off: 86400 is a day"),
        ("deadline.chunk", "30s", "must be a number, without a unit"),
        ("deadline.chunk", "inf", "must be a finite number, and no deadline can be switched off"),
        ("deadline.chunk", "nan", "must be"),
        (
            "stages.launch",
            "proces",
            "must be one of 'auto', 'inproc', 'process' or 'remote'. Did you mean \"process\"?",
        ),
        ("model", "", "must not be empty"),
        ("transport", "nixl", "is a table of settings, not a single value; did you mean transport.name=nixl?"),
        (
            "engine",
            "transformers",
            "is a table of settings, not a single value; did you mean engine.name=transformers?",
        ),
        ("stages", "2", "is a table of settings, not a single value; give them one by one: stages.NAME=VALUE"),
        ("transport.options", "x", "is a table of settings, not a single value"),
        ("pump.idle_min", 1, "idle_min (1.0) is larger than idle_max (0.0005)"),
    ],
)
def test_a_bad_value_names_its_flag_its_key_and_what_is_allowed(key, value, says):
    error = fault(None, {"model": "m", key: value}, flags={key: "--flag"})
    assert says in str(error)
    assert key.split(".")[0] in str(error)
    assert str(error).startswith("--flag: ")


def test_a_bad_value_names_its_variable_and_its_line(toml):
    assert str(fault(None, {"model": "m"}, {"KVBATON_STAGES__DECODE": "x"})) == (
        'KVBATON_STAGES__DECODE: stages.decode = "x": must be a whole number'
    )
    path = toml('model = "m"\n[deadline]\nchunk = -1\n')
    assert (
        str(fault(path))
        == f"{path}:3: deadline.chunk = -1: must be greater than 0, and no deadline can be switched off: 86400 is a day"
    )


def test_a_variable_that_should_be_a_table_and_is_not(monkeypatch):
    error = fault(None, {"model": "m"}, {"KVBATON_TRANSFER": "1MiB"})
    assert str(error).startswith("KVBATON_TRANSFER: '1MiB' is not JSON")


def test_unreadable_and_invalid_files(tmp_path, toml):
    assert str(fault(tmp_path / "absent.toml")) == (
        f"cannot read the configuration file {tmp_path / 'absent.toml'}: No such file or directory."
        " Give --config a readable TOML file."
    )
    assert "Is a directory" in str(fault(tmp_path))
    broken = toml('model = "m"\n[transfer\n')
    assert str(fault(broken)).startswith(f"{broken}:2 is not valid TOML: ")
    assert "quotes" not in str(fault(broken))
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "it is not UTF-8 text" in str(fault(binary))
    listing = tmp_path / "list.json"
    listing.write_text("[]")
    assert "must hold a table" in str(fault(listing))
    listing.write_text("{\n,}")
    assert str(fault(listing)).startswith(f"{listing}:2 is not valid JSON")


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("model = smollm2", 'model = "smollm2"'),
        ("model=/models/a b  # the best", 'model = "/models/a b"'),
        ("serve.listen = 127.0.0.1:8000", 'serve.listen = "127.0.0.1:8000"'),
    ],
)
def test_text_without_quotes_is_told_with_its_line_and_how_to_write_it(toml, line, meant):
    file = toml(f"# mine\n{line}\n")
    told = str(fault(file))
    assert told.startswith(f"{file}:2 is not valid TOML: ")
    assert told.endswith(f". Text is written in quotes: {meant}")


# -- documentation -----------------------------------------------------------------------------------------------------


def fields(model=Settings, prefix=""):
    for name, field in model.model_fields.items():
        yield prefix + name, field
        if hasattr(field.annotation, "model_fields"):
            yield from fields(field.annotation, f"{prefix}{name}.")


def test_every_setting_is_described():
    assert [key for key, field in fields() if not field.description] == []
    assert describe("transfer.chunk_bytes").startswith("Largest chunk.")
    assert describe("transport.options.seed") == ""


@pytest.mark.clause("C6.7")
def test_every_deadline_names_its_owner_and_its_outcome():
    deadlines = [key for key, _ in fields() if key.startswith("deadline.")]
    assert len(deadlines) == 11
    assert [key for key in deadlines if "Owner: " not in describe(key) or "Then: " not in describe(key)] == []


@pytest.mark.parametrize(
    ("group", "core"),
    [("transfer", GuardLimits()), ("limits", GuardLimits()), ("limits", Limits()), ("deadline", Deadlines())],
)
def test_a_default_is_the_one_of_what_acts_on_it(group, core):
    ours = getattr(load(overrides={"model": "m"})[0], group)
    shared = [name for name in type(ours).model_fields if hasattr(core, name)]
    assert shared
    assert {name: getattr(ours, name) for name in shared} == {name: getattr(core, name) for name in shared}


def test_every_bound_of_the_guard_and_every_phase_is_a_setting():
    groups = (TransferSettings, LimitsSettings, DeadlineSettings)
    known = {name for group in groups for name in group.model_fields}
    assert {*GuardLimits.__dataclass_fields__, *Deadlines.__struct_fields__} <= known


@pytest.mark.parametrize(
    ("key", "function", "parameter"),
    [
        ("deadline.connect", GuardedConnector.__init__, "connect_deadline"),
        ("deadline.chunk", GuardedConnector.__init__, "chunk_deadline"),
        ("control.heartbeat", ZmqCoordinatorChannels.__init__, "heartbeat"),
        ("control.max_message", ZmqCoordinatorChannels.__init__, "max_message"),
    ],
)
def test_a_default_is_the_one_of_the_parameter_that_it_becomes(key, function, parameter):
    group, name = key.split(".")
    default = getattr(getattr(load(overrides={"model": "m"})[0], group), name)
    assert default == inspect.signature(function).parameters[parameter].default


def test_the_schema_is_json():
    assert "transfer" in json.loads(json.dumps(Settings.model_json_schema()))["properties"]


def test_a_stage_does_not_import_what_reads_variables():
    """It is told its settings, and pays for each import at each start."""
    code = "import sys, kvbaton.plugins; print('pydantic_settings' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"
