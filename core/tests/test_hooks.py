"""Hooks: told one by one, isolated, reported once; misspelt ones refused."""

import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvbaton.errors import PluginBroken
from kvbaton.hooks import HOOKS, Hooks, Specifications, StageLoad, hookimpl

PREFILL = (StageLoad("prefill-0", 0, 10, 2), StageLoad("prefill-1", 1, 10, 2))
DECODE = (StageLoad("decode-0", 0, 10, 2),)
PAIRS = [("prefill-0", "decode-0"), ("prefill-1", "decode-0")]


class Observer:
    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []

    @hookimpl
    def kvbaton_milestone(self, milestone, stage):
        self.seen.append((milestone, stage))


class Angry(Observer):
    @hookimpl
    def kvbaton_milestone(self, milestone):
        self.seen.append((milestone, ""))
        raise RuntimeError("I do not like this")


def milestone(hooks: Hooks, name: str = "received") -> None:
    hooks.tell("kvbaton_milestone", transfer="0" * 32, request="a", stage="decode-0", milestone=name, at=1.0)


def choose(hooks: Hooks) -> tuple[str, str] | None:
    return hooks.choose_pair("a", range(7), PREFILL, DECODE, PAIRS)


def test_every_hook_says_when_it_runs():
    assert len(HOOKS) >= 6
    for name in HOOKS:
        assert len(getattr(Specifications, name).__doc__ or "") > 40, name


def test_an_observer_gets_the_arguments_it_names():
    observer = Observer()
    milestone(Hooks([observer]))
    assert observer.seen == [("received", "decode-0")]


def test_no_observers_cost_nothing_and_decide_nothing():
    hooks = Hooks()
    milestone(hooks)
    assert not hooks
    assert choose(hooks) is None


def test_an_observer_that_raises_is_isolated_and_reported_once_by_name(caplog):
    before, angry, after = Observer(), Angry(), Observer()
    hooks = Hooks([before, angry, after])

    with caplog.at_level(logging.ERROR):
        milestone(hooks, "received")
        milestone(hooks, "imported")

    assert [o.seen for o in (before, after)] == [[("received", "decode-0"), ("imported", "decode-0")]] * 2
    assert len(angry.seen) == 2
    assert len(caplog.records) == 1
    assert "Angry failed in kvbaton_milestone (RuntimeError: I do not like this)" in caplog.text
    assert list(hooks.failures.values()) == [2]


def test_ctrl_c_is_not_an_observers_fault():
    class Interrupted:
        @hookimpl
        def kvbaton_milestone(self):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        milestone(Hooks([Interrupted()]))


def test_the_first_policy_with_an_answer_decides_and_the_newest_is_asked_first():
    asked = []

    def policy(name, answer):
        class Policy:
            def kvbaton_choose_pair(self, request, prompt_tokens, prefill, decode):
                asked.append((name, request, prompt_tokens))
                return answer

        return Policy()

    hooks = Hooks(
        [policy("old", ("prefill-0", "decode-0")), policy("new", ["prefill-1", "decode-0"]), policy("no", None)]
    )
    assert choose(hooks) == ("prefill-1", "decode-0")
    assert asked == [("no", "a", 7), ("new", "a", 7)]


@pytest.mark.parametrize(
    "answer", [("decode-0", "prefill-0"), "prefill-0", 7, (1, [2]), ("prefill-0", "decode-0", "x")]
)
def test_a_policy_that_names_no_candidate_is_reported_and_passed_over(answer, caplog):
    class Confused:
        def kvbaton_choose_pair(self):
            return answer

    class Sane:
        def kvbaton_choose_pair(self):
            return "prefill-0", "decode-0"

    hooks = Hooks([Sane(), Confused()])
    assert choose(hooks) == ("prefill-0", "decode-0")
    assert choose(hooks) == ("prefill-0", "decode-0")
    assert len([r for r in caplog.records if "no pair out of the candidates" in r.getMessage()]) == 1


# -- what is refused at load -------------------------------------------------------------------------------------------


def refusal(observer: object) -> str:
    hooks = Hooks()
    with pytest.raises(PluginBroken) as caught:
        hooks.add(observer)
    assert not hooks, "a refused observer stayed registered"
    return str(caught.value)


def test_a_misspelt_hook_is_an_error_with_the_closest_match():
    class Misspelt:
        @hookimpl
        def kvbaton_milestones(self, milestone):
            pass

    assert 'there is no hook kvbaton_milestones. Did you mean "kvbaton_milestone"?' in refusal(Misspelt())


def test_a_misspelt_hook_without_a_marker_is_an_error_too():
    class Unmarked:
        def kvbaton_request_finish(self, record):
            pass

    assert 'Did you mean "kvbaton_request_finished"?' in refusal(Unmarked())


def test_a_forgotten_marker_is_not_an_observer_that_is_never_called():
    class Unmarked:
        def __init__(self):
            self.seen = []

        def kvbaton_milestone(self, milestone):
            self.seen.append(milestone)

    observer = Unmarked()
    milestone(Hooks([observer]))
    assert observer.seen == ["received"]


def test_an_argument_that_the_hook_does_not_have_is_an_error():
    class Curious:
        @hookimpl
        def kvbaton_milestone(self, milestone, tensors):
            pass

    assert "tensors" in refusal(Curious())


def test_a_wrapper_is_refused():
    class Wrapper:
        @hookimpl(wrapper=True)
        def kvbaton_milestone(self):
            return (yield)

    assert "cannot be wrapped" in refusal(Wrapper())


def test_the_same_observer_twice_is_refused_and_the_first_stays():
    observer = Observer()
    hooks = Hooks([observer])
    with pytest.raises(PluginBroken):
        hooks.add(observer)
    milestone(hooks)
    assert len(observer.seen) == 1


def test_two_observers_of_one_class_are_welcome():
    first, second = Observer(), Observer()
    milestone(Hooks([first, second]))
    assert len(first.seen) == len(second.seen) == 1


def test_a_hook_of_another_version_may_be_optional():
    class Newer(Observer):
        @hookimpl(optionalhook=True)
        def kvbaton_from_the_future(self):
            pass

    newer = Newer()
    milestone(Hooks([newer]))
    assert newer.seen


def test_installed_observers_are_loaded_one_by_one_and_broken_ones_left_out(tmp_path, monkeypatch, caplog):
    modules = {
        "obs_good": "seen = []\ndef kvbaton_milestone(milestone):\n    seen.append(milestone)\n",
        "obs_broken": "import there_is_no_such_module\n",
        "obs_misspelt": "def kvbaton_milestoned(milestone):\n    pass\n",
    }
    for name, text in modules.items():
        (tmp_path / f"{name}.py").write_text(text)
        info = tmp_path / f"{name}-1.5.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
        (info / "entry_points.txt").write_text(f"[kvbaton.hooks]\n{name}_hooks = {name}\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    hooks = Hooks()
    hooks.add_installed()
    milestone(hooks)

    assert sys.modules["obs_good"].seen == ["received"]
    assert "obs_broken_hooks of obs_broken 1.5 is left out: ModuleNotFoundError" in caplog.text
    assert "obs_misspelt_hooks of obs_misspelt 1.5 is left out: PluginBroken" in caplog.text


def test_importing_is_cheap():
    """An observer's module imports ``hookimpl``: that must bring in nothing but pluggy."""
    heavy = {"pydantic", "stevedore", "zmq", "torch", "transformers", "typer", "rich", "importlib.metadata"}
    code = f"import sys, kvbaton.hooks; print(sorted(set(sys.modules) & {heavy!r}))"
    source = str(Path(sys.modules["kvbaton.hooks"].__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, env={"PYTHONPATH": source}
    )
    assert done.stdout.strip() == "[]"


def test_a_module_is_named_after_itself(caplog):
    def failing():
        raise ValueError

    observer = SimpleNamespace(kvbaton_milestone=failing)
    hooks = Hooks()
    hooks.add(observer, "by-name")
    milestone(hooks)
    assert hooks.failures == {"by-name": 1}
