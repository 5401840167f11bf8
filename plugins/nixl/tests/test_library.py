"""Options, and finding, starting and understanding NIXL."""

import importlib
import importlib.util
import os
import subprocess
import sys
import threading
import types

import pytest
from pydantic import ValidationError

import kvbaton.cuda
from kvbaton.connector import Need
from kvbaton.errors import OptionsError, PeerLost, PluginUnavailable, TransportError
from kvbaton.identity import PeerId
from kvbaton.plugins import choose_connector
from kvbaton_nixl import library
from kvbaton_nixl.link import destroy
from kvbaton_nixl.options import NixlOptions

# -- options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"ucx": {"UCX_TLS": "tcp"}}, "write 'TLS'"),
        ({"ucx": {"tls": "tcp"}}, "no setting of UCX"),
        ({"ucx": {"TLS=x": "tcp"}}, "no setting of UCX"),
        ({"ucx": {"": "tcp"}}, "no setting of UCX"),
        ({"ucx": {"TLS": 3}}, "valid string"),
        ({"ucxx": {}}, "Extra inputs"),
        ({"backend": "GDS"}, "'UCX'"),
        ({"heartbeat": 0}, "greater than or equal"),
        ({"heartbeat": float("nan")}, "less than or equal"),
        ({"inflight_chunks": 0}, "greater than or equal"),
        ({"inflight_chunks": 4097}, "less than or equal"),
        ({"log_level": "fatal"}, "'FATAL'"),
        ({"packing": "sometimes"}, "'auto', 'always' or 'never'"),
        ({"packing_below": 0}, "greater than or equal"),
        ({"packing_below": "some"}, "write for example 4096, 64MiB or 2GiB"),
        ({"staging_slots": 0}, "greater than or equal"),
        ({"staging_slots": 257}, "less than or equal"),
        ({"staging_bytes": 4095}, "greater than or equal"),
        ({"staging_bytes": "5GiB"}, "less than or equal"),
        ({"staging_bytes": "4 miles"}, "write for example 4096, 64MiB or 2GiB"),
        ({"telemetry": "perhaps"}, "valid boolean"),
    ],
)
def test_options_that_cannot_be_are_refused_and_named(options, says):
    with pytest.raises(ValidationError, match=says):
        NixlOptions(**options)


def test_sizes_may_have_units():
    options = NixlOptions(staging_bytes="4MiB", packing_below="6 KiB")
    assert (options.staging_bytes, options.packing_below) == (4 << 20, 6 << 10)
    assert type(options.staging_bytes) is int
    assert NixlOptions(staging_bytes="8192").staging_bytes == 8192


def test_a_bad_option_is_named_to_who_configures_it():
    with pytest.raises(
        OptionsError, match=r"transport\.options\.staging_bytes = '4 miles': .*write for example 4096, 64MiB or 2GiB"
    ):
        choose_connector("nixl", Need(), {"staging_bytes": "4 miles"})
    with pytest.raises(OptionsError, match=r"no option .staging_byte.\. .*staging_bytes"):
        choose_connector("nixl", Need(), {"staging_byte": "4MiB"})


def test_every_option_says_what_it_is():
    assert all(field.description for field in NixlOptions.model_fields.values())


@pytest.mark.parametrize("settings", [{"TLS": "no-such-transport"}])
def test_settings_that_ucx_cannot_use_are_named_in_the_error(settings):
    with pytest.raises(TransportError, match=r"no-such-transport.*UCX_LOG_LEVEL") as caught:
        library.make_agent("unlucky", NixlOptions(ucx=settings))
    assert caught.value.__cause__ is not None


# -- finding it --------------------------------------------------------------------------------------------------------


@pytest.fixture
def unloaded():
    """``load`` forgets what it has loaded, before and after."""
    library.load.cache_clear()
    yield
    library.load.cache_clear()


def test_a_missing_nixl_is_said_with_the_remedy(unloaded, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "not installed" in library.missing()
    with pytest.raises(TransportError, match="pip install kvbaton-nixl"):
        library.load("FATAL")


def test_another_platform_is_said(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "darwin" in library.missing()


def test_a_nixl_that_does_not_load_is_said_with_its_cause(unloaded, monkeypatch):
    def broken(name):
        raise ImportError("libucp.so.0: cannot open shared object file")

    monkeypatch.setattr(importlib, "import_module", broken)
    with pytest.raises(TransportError, match=r"does not load: libucp\.so\.0") as caught:
        library.load("FATAL")
    assert isinstance(caught.value.__cause__, ImportError)


def test_two_copies_of_ucx_in_one_process_are_refused(unloaded, monkeypatch):
    monkeypatch.setitem(sys.modules, "ucxx", types.ModuleType("ucxx"))
    with pytest.raises(TransportError, match=r"one transport per process"):
        library.load("FATAL")


def test_the_build_fits_the_torch_that_is_loaded(unloaded, monkeypatch):
    loaded = []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(importlib, "import_module", lambda name: loaded.append(name) or types.ModuleType(name))
    for cuda in ("12.8", "13.0", None):
        torch = types.ModuleType("torch")
        torch.version = types.SimpleNamespace(cuda=cuda)
        monkeypatch.setitem(sys.modules, "torch", torch)
        library.load.cache_clear()
        library.load("FATAL")
    assert loaded == ["nixl_cu12._api", "nixl_cu13._api", "nixl_cu13._api"]


@pytest.mark.clause("T13")
def test_that_there_is_no_gpu_is_said_before_a_package_that_would_not_help(monkeypatch):
    monkeypatch.setattr(library, "missing", lambda: "NIXL is not installed")
    monkeypatch.setattr(kvbaton.cuda, "visible", lambda: False)
    with pytest.raises(
        PluginUnavailable, match="no CUDA device is visible, and cuda memory was asked for: keep the KV"
    ):
        choose_connector("nixl", Need("cuda", "cross_process"))
    with pytest.raises(PluginUnavailable, match="NIXL is not installed: pip install kvbaton-nixl"):
        choose_connector("nixl", Need("host", "cross_process"))
    monkeypatch.setattr(kvbaton.cuda, "visible", lambda: True)
    with pytest.raises(PluginUnavailable, match="NIXL is not installed: pip install kvbaton-nixl"):
        choose_connector("nixl", Need("cuda", "cross_process"))


@pytest.mark.clause("T13")
def test_probing_and_importing_load_no_native_library():
    program = (
        "import sys; from kvbaton_nixl import plugin; from kvbaton.connector import Need; plugin.probe(Need());"
        " print(sorted(name for name in sys.modules if name.startswith(('nixl_cu', 'nixl.', 'torch', 'triton'))))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, check=True, timeout=60)
    assert (done.stdout, done.stderr) == (b"[]\n", b"")


# -- starting it -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [None, "rc"])
def test_settings_are_in_the_environment_only_while_an_agent_is_made(monkeypatch, before):
    monkeypatch.delenv("UCX_TLS", raising=False)
    if before is not None:
        monkeypatch.setenv("UCX_TLS", before)
    with library._environment({"UCX_TLS": "tcp,self"}):
        assert os.environ["UCX_TLS"] == "tcp,self"
    assert os.environ.get("UCX_TLS") == before
    agent = library.make_agent(f"short {before}", NixlOptions(ucx={"TLS": "tcp,self"}))
    destroy(agent)
    assert os.environ.get("UCX_TLS") == before
    with pytest.raises(TransportError):
        library.make_agent("unlucky", NixlOptions(ucx={"TLS": "no-such-transport"}))
    assert os.environ.get("UCX_TLS") == before


def test_two_stages_of_one_process_do_not_mix_their_settings():
    inside, seen = threading.Event(), []

    def other():
        with library._environment({"UCX_TLS": "shm"}):
            seen.append(os.environ["UCX_TLS"])

    with library._environment({"UCX_TLS": "tcp"}):
        thread = threading.Thread(target=lambda: (inside.set(), other()))
        thread.start()
        assert inside.wait(10)
        thread.join(0.05)
        assert os.environ["UCX_TLS"] == "tcp"
    thread.join(10)
    assert seen == ["shm"]
    assert "UCX_TLS" not in os.environ


def in_a_process(program, **environment):
    """What a new process prints, and whatever it complains of."""
    kept = {key: value for key, value in os.environ.items() if not key.endswith("_LOG_LEVEL")}
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, check=True, timeout=60, text=True,
        env=kept | environment,
    )  # fmt: skip
    return done.stdout, done.stderr


LOOK = """
import os
from kvbaton_nixl import library
from kvbaton_nixl.link import destroy
from kvbaton_nixl.options import NixlOptions
before = dict(os.environ)
agent = library.make_agent("one", NixlOptions())
try:
    agent.add_remote_agent(b"no agent")
except Exception:
    pass
try:
    library.make_agent("two", NixlOptions(ucx={"TLS": "no-such-transport"}))
except Exception:
    pass
destroy(agent)
print(dict(os.environ) == before)
"""


def test_nixl_and_ucx_are_silent_and_nothing_is_handed_on_to_children():
    assert in_a_process(LOOK) == ("True\n", "")


@pytest.mark.parametrize("name", ["NIXL_LOG_LEVEL", "UCX_LOG_LEVEL"])
def test_who_wants_to_see_more_does(name):
    out, err = in_a_process(LOOK, **{name: "INFO" if name.startswith("NIXL") else "info"})
    assert "True\n" in out
    assert {"NIXL_LOG_LEVEL": "nixl", "UCX_LOG_LEVEL": "UCX"}[name] in out.replace("True", "") + err


# -- understanding it --------------------------------------------------------------------------------------------------


@pytest.mark.clause("T7", "C6.3")
def test_errors_keep_their_cause_and_name_the_peer():
    class nixlRemoteDisconnectError(Exception):
        pass

    peer = PeerId("decode-0", 7)
    gone = nixlRemoteDisconnectError("NIXL_ERR_REMOTE_DISCONNECT")
    ours = library.translate(gone, "chunk 3", peer)
    assert isinstance(ours, PeerLost)
    assert ours.__cause__ is gone
    assert "chunk 3" in str(ours)
    assert str(peer) in str(ours)
    other = ValueError("odd")
    ours = library.translate(other, "chunk 4", peer)
    assert type(ours) is TransportError
    assert ours.__cause__ is other
    assert "ValueError: odd" in str(ours)
