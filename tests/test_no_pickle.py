"""No distribution that runs in production can unpickle anything: neither on a socket nor from a file (C9.3)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from .workspace import Distribution, distributions, imports, python_files

#: Modules that run what they read.
UNSAFE_MODULES = {
    "pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "jsonpickle",
    # its pipes, queues and managers unpickle what they receive
    "multiprocessing",
}  # fmt: skip
#: Methods of pyzmq and others that do.
UNSAFE_CALLS = {"send_pyobj", "recv_pyobj", "read_pickle", "to_pickle"}

#: The kit drives its own child processes over pipes of its own, and is never part of a deployment.
PRODUCTION = [item for item in distributions() if item.name != "kvbaton-conformance"]


def unsafe_calls(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(), str(file))):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        arguments = {word.arg: word.value for word in node.keywords}
        allowed = arguments.get("allow_pickle")
        if name in UNSAFE_CALLS or (allowed is not None and getattr(allowed, "value", True) is not False):
            yield f"{file}:{node.lineno} calls {name}"
        torch_load = isinstance(node.func, ast.Attribute) and ast.unparse(node.func) == "torch.load"
        if torch_load and getattr(arguments.get("weights_only"), "value", False) is not True:
            yield f"{file}:{node.lineno} calls torch.load without weights_only=True"


def unsafe(source: Path) -> list[str]:
    """What in the modules below ``source`` could unpickle."""
    found = []
    for file in python_files(source):
        found += [f"{file}:{line} imports {name}" for line, name in imports(file) if name in UNSAFE_MODULES]
        found += unsafe_calls(file)
    return found


@pytest.mark.clause("C9.3")
@pytest.mark.parametrize("distribution", PRODUCTION, ids=lambda item: item.name)
def test_nothing_in_production_can_unpickle(distribution: Distribution) -> None:
    assert list(python_files(distribution.source))
    assert not unsafe(distribution.source)


@pytest.mark.parametrize(
    "line",
    [
        "import pickle", "from pickle import loads", "import multiprocessing.connection", "import dill as json",
        'x = importlib.import_module("cloudpickle")', "socket.recv_pyobj()", "np.load(file, allow_pickle=True)",
        "torch.load(file)", "torch.load(file, weights_only=False)",
    ],
)  # fmt: skip
def test_what_could_unpickle_is_noticed(tmp_path: Path, line: str) -> None:
    module = tmp_path / "module.py"
    module.write_text("import json\ntorch.load(file, weights_only=True)\nnp.load(file, allow_pickle=False)\n")
    assert not unsafe(tmp_path)
    module.write_text(f"def function():\n    {line}\n")
    assert unsafe(tmp_path)
