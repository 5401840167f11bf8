"""``kvbaton run``: what it prints, where, and with which exit status."""

import io
import json
import re

import pytest
from rich.console import Console

from kvbaton.engine import SamplingParams
from kvbaton.identity import RequestKey
from kvbaton.records import RequestRecord

PROMPT = ("run", "--model", "m", "--prompt")


# -- text --------------------------------------------------------------------------------------------------------------


def test_one_prompt_prints_its_text_and_then_the_tables(kvbaton, fake):
    result = kvbaton(*PROMPT, "one two three")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("three two one\n")
    for fact in ("request", "0 → 0", "4.0 KiB", "length", "reserved", "1.0", "received", "12.5"):
        assert fact in result.stdout
    assert result.stderr == ""
    assert fake.log == ["start", "add 1", "close"]


def test_the_tables_are_whole_at_80_columns():
    """Every figure of every request on one line, nothing cut off; long ids are folded."""
    from kvbaton.cli.prompts import Prompt
    from kvbaton.cli.report import Answer, print_tables

    milestones = {"placed": 0.0001, "destination_retired": 12.3456, "handle_done": 1.0}
    answers = [
        Answer(
            Prompt(name, "", SamplingParams(), ""),
            RequestRecord(
                RequestKey(name), None, 131072, (1,) * 4096, (), "cancelled", chunks=2048, segments=1048576,
                bytes=1000 << 20, prefix_prefill=131072, prefix_decode=65536, prefill="prefill-12", decode="decode-3",
                milestones=milestones,
            ),
            "",
        )
        for name in ("1", "2", "river", "4", "5", "6", "a-rather-long-id-of-a-request")
    ]  # fmt: skip
    page = io.StringIO()
    print_tables(Console(width=80, file=page), answers)
    lines = page.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in page.getvalue()
    figures = ["131072", "131072/65536", "4096", "2048", "1048576", "1000.0", "MiB", "12", "→", "3", "cancelled"]
    assert [line.split()[-11:] for line in lines if line.endswith("cancelled")] == [figures] * 7
    assert page.getvalue().count("12345.6") == 7


def test_several_prompts_run_side_by_side_and_their_texts_do_not_mix(kvbaton, fake):
    result = kvbaton(*PROMPT, "a b c d", "--prompt", "e f g", "--prompt", "x")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("[1] a b c d\nd c b a\n[2] e f g\ng f e\n[3] x\nx\n")
    assert fake.log == ["start", "add 1", "add 2", "add 3", "close"]


def test_no_more_requests_are_outstanding_than_may_wait(kvbaton, fake, monkeypatch):
    most = []
    add = fake.add_request

    def counted(self, *args, **kwargs):
        key = add(self, *args, **kwargs)
        most.append(len(self.live))
        return key

    monkeypatch.setattr(fake, "add_request", counted)
    prompts = [argument for number in range(7) for argument in ("--prompt", f"p{number} q r")]
    result = kvbaton("run", "--model", "m", *prompts, "--set", "limits.waiting=3")
    assert result.exit_code == 0, result.output
    assert len(most) == 7
    assert max(most) == 3


# -- JSON --------------------------------------------------------------------------------------------------------------


def test_json_is_exactly_one_object(kvbaton):
    result = kvbaton(*PROMPT, "one two", "--prompt", "three", "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert set(found) == {"requests"}
    first, second = found["requests"]
    assert (first["id"], first["prompt"], first["text"], first["finish_reason"]) == (
        "1",
        "one two",
        "two one",
        "length",
    )
    assert len(first["token_ids"]) == 2
    assert (first["chunks"], first["bytes"]) == (2, 4096)
    assert first["milestones"] == {"reserved": 0.001, "received": 0.0125}
    assert second["text"] == "three"


def test_json_with_compare_says_whether_it_is_equal(kvbaton, fake):
    result = kvbaton(*PROMPT, "one two", "--json", "--compare")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["equal"] is True
    assert fake.log[-2:] == ["close", "colocated"]  # one after the other: two models need not fit at once


# -- compare -----------------------------------------------------------------------------------------------------------


@pytest.mark.clause("A1")
def test_the_last_line_of_an_equal_comparison(kvbaton):
    result = kvbaton(*PROMPT, "one two", "--prompt", "three", "--compare")
    assert result.exit_code == 0
    assert result.stdout.endswith("\nequal: the tokens of all 2 requests equal the undisaggregated run's\n")
    result = kvbaton(*PROMPT, "one two", "--compare")
    assert result.stdout.endswith("\nequal: the tokens of the request equal the undisaggregated run's\n")


@pytest.mark.clause("A1")
@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("differ", "token 1 is"),
        ("depth", "exit depth 0 is 1 here, 2 undisaggregated"),
        ("reason", "finish reason length here, stop undisaggregated"),
    ],
)
def test_each_kind_of_difference_is_found(kvbaton, word, says):
    result = kvbaton(*PROMPT, f"one {word}", "--prompt", "fine", "--compare")
    assert result.exit_code == 1
    assert f"request 1: {says}" in result.stdout
    assert result.stdout.endswith("\nunequal: 1 of 2 requests differ from the undisaggregated run\n")
    result = kvbaton(*PROMPT, f"one {word}", "--compare", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["equal"] is False
    assert f"kvbaton: request 1: {says}" in result.stderr


def test_a_shorter_answer_differs(kvbaton):
    from kvbaton.cli.report import _first_difference

    assert _first_difference("token", (1, 2), (1, 2, 3)) == "2 tokens here, 3 undisaggregated"


# -- failures ----------------------------------------------------------------------------------------------------------


def test_a_failed_request_leaves_the_others_alone_and_exits_1(kvbaton):
    result = kvbaton(*PROMPT, "one fail two", "--prompt", "fine here")
    assert result.exit_code == 1
    assert "here fine" in result.stdout
    assert "failed" in result.stdout
    assert result.stderr == "kvbaton: request 1 failed: C6.3 chunk 1 passed its deadline\n"


@pytest.mark.parametrize("prompts", [("overlong", "fail two"), ("fail two", "overlong"), ("overlong", "fine")])
def test_a_request_that_a_stage_refused_is_bad_input(kvbaton, prompts):
    result = kvbaton(*PROMPT, prompts[0], "--prompt", prompts[1])
    assert result.exit_code == 2
    assert "failed: prefill-0 cannot hold it\n" in result.stderr


def test_a_failed_request_in_json(kvbaton):
    result = kvbaton(*PROMPT, "one fail two", "--json")
    assert result.exit_code == 1
    (request,) = json.loads(result.stdout)["requests"]
    assert (request["finish_reason"], request["error"]) == ("failed", "C6.3 chunk 1 passed its deadline")


def test_a_prompt_that_can_never_fit_is_bad_input(kvbaton, fake):
    result = kvbaton(*PROMPT, "fine", "--prompt", "refuse this")
    assert result.exit_code == 2
    assert result.stderr == "kvbaton: --prompt 2: a prompt of 9 tokens plus 16 can never fit into 8\n"
    assert fake.log[-1] == "close"


def test_a_prompt_without_tokens_is_bad_input(kvbaton):
    result = kvbaton(*PROMPT, "zero")
    assert result.exit_code == 2
    assert result.stderr == "kvbaton: --prompt 1: the model's tokenizer makes no token of it\n"


@pytest.mark.parametrize(
    ("model", "status", "says"),
    [
        ("absent", 2, "prefill-0 did not start: no such model"),  # a failed start because of bad configuration
        ("late", 1, "prefill-0 did not start in time"),
        ("crash", 1, "stage decode-0 ended: killed by signal 9."),
    ],
)
def test_errors_are_one_line_and_their_status_says_whose_fault_it_is(kvbaton, model, status, says):
    result = kvbaton("run", "--model", model, "--prompt", "x")
    assert result.exit_code == status
    assert result.stderr == f"kvbaton: {says}\n"
    assert "Traceback" not in result.output


def test_debug_shows_the_traceback(kvbaton):
    result = kvbaton("run", "--model", "late", "--prompt", "x", "--debug")
    assert result.exit_code == 1
    assert "Traceback" in result.stderr
    assert result.stderr.endswith("kvbaton: prefill-0 did not start in time\n")


def test_a_folder_for_profiles_in_one_that_is_not_there_is_refused_before_anything_runs(kvbaton, fake, tmp_path):
    mistyped = tmp_path / "mistyped"
    result = kvbaton(*PROMPT, "x", "--profile", str(mistyped / "p"))
    told = f"kvbaton: the profiles cannot be written to {mistyped / 'p'}: there is no directory {mistyped}\n"
    assert (result.exit_code, result.stderr, fake.log) == (2, told, [])
    assert not mistyped.exists()


@pytest.mark.parametrize("model", ["open-files", "open-files-elsewhere"])
def test_the_want_of_open_files_is_one_line_with_what_to_raise(kvbaton, model):
    result = kvbaton("run", "--model", model, "--prompt", "x")
    assert result.exit_code == 1
    [line] = result.stderr.splitlines()
    assert re.search(r"Too many open files\. A process may have \d+ files open here: raise that with ulimit -n", line)


def test_a_bug_keeps_its_traceback(kvbaton):
    result = kvbaton("run", "--model", "bug", "--prompt", "x")
    assert isinstance(result.exception, ZeroDivisionError)


# -- bad configuration and input: exit 2, one line ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--prompt", "x"], "model is not set. Give --model"),
        ([*PROMPT[1:], " "], "--prompt 1 is empty"),
        ([*PROMPT[1:], "x", "--prompts", "absent.txt"], "cannot read the prompt file absent.txt: No such file"),
        ([*PROMPT[1:], "x", "--prompts", "."], "cannot read the prompt file .: Is a directory"),
        ([*PROMPT[1:], "x", "--config", "absent.toml"], "cannot read the configuration file absent.toml"),
        ([*PROMPT[1:], "x", "--prefill", "two"], '--prefill: stages.prefill = "two": must be a whole number'),
        ([*PROMPT[1:], "x", "--decode", "0"], '--decode: stages.decode = "0": must be at least 1'),
        ([*PROMPT[1:], "x", "--launch", "threads"], "--launch: stages.launch"),
        ([*PROMPT[1:], "x", "--set", "transfer.chunk_bites=1"], 'Did you mean "chunk_bytes"?'),
        ([*PROMPT[1:], "x", "--set", "deadline.chunk"], '--set "deadline.chunk": write KEY=VALUE'),
        ([*PROMPT[1:], "x", "--transport-option", "=1"], '--transport-option "=1": write KEY=VALUE'),
        ([*PROMPT[1:], "x", "--max-tokens", "0"], "--max-tokens: max_tokens = 0: must be a whole number, at least 1"),
        ([*PROMPT[1:], "x", "--max-tokens", "1.5"], '--max-tokens: max_tokens = "1.5": must be a whole number'),
        ([*PROMPT[1:], "x", "--top-p", "most"], '--top-p: top_p = "most": must be a number'),
        ([*PROMPT[1:], "x", "--temperature", "-1"], "--temperature: temperature = -1.0: must be"),
        ([*PROMPT[1:], "x", "--temperature", "nan"], "--temperature: temperature = nan: must be a finite number"),
        ([*PROMPT[1:], "x", "--top-p", "0"], "--top-p: top_p = 0.0: must be"),
        ([*PROMPT[1:], "x", "--top-k", "-3"], "--top-k: top_k = -3: must be"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_flags(kvbaton, fake, tmp_path, monkeypatch, arguments, says):
    monkeypatch.chdir(tmp_path)
    result = kvbaton("run", *arguments)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("kvbaton: ")
    assert says.replace("`", "") in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""
    assert fake.log == [], "something was started"


def test_an_unknown_key_in_the_config_names_the_line(kvbaton, tmp_path):
    path = tmp_path / "k.toml"
    path.write_text('model = "m"\n[transfer]\nchunk_bites = 1\n')
    result = kvbaton("run", "--config", str(path), "--prompt", "x")
    assert result.exit_code == 2
    assert result.stderr.startswith(
        f'kvbaton: {path}:3: no setting "transfer.chunk_bites". Did you mean "chunk_bytes"?'
    )


# -- where settings come from ------------------------------------------------------------------------------------------


def test_file_environment_and_flags_are_one_settings_model(kvbaton, fake, tmp_path, monkeypatch):
    seen = []
    start = fake.start.__func__

    def spy(cls, settings, **how):
        seen.append(settings)
        return start(cls, settings, **how)

    monkeypatch.setattr(fake, "start", classmethod(spy))
    path = tmp_path / "k.toml"
    path.write_text('model = "m"\n[stages]\nprefill = 2\ndecode = 2\n[engine.options]\nblock_tokens = 8\n')
    monkeypatch.setenv("KVBATON_STAGES__DECODE", "3")
    result = kvbaton(
        "run", "--config", str(path), "--prompt", "x", "--set", "stages.prefill=5", "--prefill", "4",
        "--transport", "loopback", "--transport-option", "seed=7", "--engine-option", "block_tokens=16",
        "--set", "stages.devices=[0,1,2,3,4,5,6]",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    (settings,) = seen
    assert (settings.stages.prefill, settings.stages.decode) == (4, 3)
    assert settings.stages.devices == (0, 1, 2, 3, 4, 5, 6)
    assert (settings.transport.name, settings.transport.options) == ("loopback", {"seed": "7"})
    assert settings.engine.options == {"block_tokens": "16"}


def test_sampling_flags_reach_the_request_and_a_jsonl_line_overrules_them(kvbaton, fake, tmp_path, monkeypatch):
    seen = {}
    add = fake.add_request

    def spy(self, request, request_id=None, **how):
        seen[request_id] = request.sampling
        return add(self, request, request_id, **how)

    monkeypatch.setattr(fake, "add_request", spy)
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a b", "id": "mine", "max_tokens": 3, "stop": "x"}\n{"prompt": "c"}\n')
    flags = ("--max-tokens", "5", "--seed", "9", "--temperature", "0.5", "--top-k", "4", "--top-p", "0.9")
    result = kvbaton("run", "--model", "m", "--prompts", str(path), *flags)
    assert result.exit_code == 0, result.output
    assert (seen["mine"].max_tokens, seen["mine"].stop, seen["mine"].seed) == (3, ("x",), 9)
    other = seen["2"]
    assert (other.max_tokens, other.seed, other.temperature, other.top_k, other.top_p) == (5, 9, 0.5, 4, 0.9)
