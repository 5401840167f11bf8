"""Prompts from flags, files and stdin, and what is wrong with those that are refused."""

import json
import os
import subprocess

import pytest

from kvbaton.cli.prompts import gather
from kvbaton.errors import SettingsError

RUN = ("run", "--model", "m")


def test_a_text_file_has_one_prompt_per_line_and_blank_lines_are_skipped(tmp_path):
    path = tmp_path / "p.txt"
    path.write_bytes("first\r\n\n  \nsecond \x0c half\nthird é".encode())
    assert [p.text for p in gather((), path, {})] == ["first", "second \x0c half", "third é"]


def test_flags_and_file_are_joined_and_numbered_in_order(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "b", "id": "1"}\n\n{"prompt": "c", "id": 3}\n{"prompt": "d"}\n')
    assert [(p.id, p.text) for p in gather(("a",), path, {})] == [("1-2", "a"), ("1", "b"), ("3", "c"), ("4", "d")]


def test_stdin_is_read_where_nothing_else_is_given(kvbaton):
    result = kvbaton(*RUN, "--json", stdin="one two\nthree\n")
    assert [r["prompt"] for r in json.loads(result.stdout)["requests"]] == ["one two", "three"]
    result = kvbaton(*RUN, "--json", "--prompt", "x", stdin="one two\nthree\n")
    assert len(json.loads(result.stdout)["requests"]) == 1


@pytest.mark.parametrize(
    ("stdin", "says"),
    [("\n \n", "no prompt: stdin is empty"), (b"\xff\xfe", "stdin is not UTF-8 text")],
    ids=["blank", "binary"],
)
def test_an_empty_or_binary_stdin(kvbaton, stdin, says):
    result = kvbaton(*RUN, stdin=stdin)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"kvbaton: {says}")


def test_a_terminal_is_not_waited_for(kvbaton, monkeypatch):
    monkeypatch.setattr("typer.testing._NamedTextIOWrapper.isatty", lambda self: True, raising=False)
    monkeypatch.setattr("kvbaton.cli.prompts.sys.stdin", type("Tty", (), {"isatty": lambda self: True})())
    with pytest.raises(SettingsError, match="no prompt: give --prompt TEXT"):
        gather((), None, {})


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("not json", "not JSON: Expecting value"),
        ('["a"]', 'must be an object such as {"prompt": "..."}, not list'),
        ("{}", '"prompt" is missing'),
        ('{"prompt": 7}', '"prompt" must be text'),
        ('{"prompt": "  "}', '"prompt" is empty'),
        ('{"prompt": "x", "max_token": 3}', 'unknown field "max_token". Did you mean "max_tokens"?'),
        ('{"prompt": "x", "max_tokens": 0}', "max_tokens = 0: must be a whole number, at least 1"),
        ('{"prompt": "x", "max_tokens": "3"}', 'max_tokens = "3": must be int, got str'),
        ('{"prompt": "x", "stop": [1]}', "stop = [1]: must be str, got int"),
        ('{"prompt": "x", "temperature": Infinity}', "temperature = inf: must be a finite number"),
        ('{"prompt": "x", "id": ""}', '"id" must be text or a whole number'),
        ('{"prompt": "x", "id": true}', '"id" must be text or a whole number'),
        ('{"prompt": "x", "id": "first"}', 'the id "first" is already that of {path}:1'),
    ],
    ids=lambda value: value[:24],
)
def test_a_bad_line_is_named_with_its_number(tmp_path, line, says):
    path = tmp_path / "p.jsonl"
    path.write_text(f'{{"prompt": "ok", "id": "first"}}\n\n{line}\n')
    with pytest.raises(SettingsError) as caught:
        gather((), path, {})
    assert str(caught.value).startswith(f"{path}:3: {says.replace('{path}', str(path))}")


def test_files_without_prompts(tmp_path):
    for name in ("p.txt", "p.jsonl"):
        path = tmp_path / name
        path.write_text("\n\n")
        with pytest.raises(SettingsError, match="holds no prompt"):
            gather((), path, {})
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(SettingsError, match="it is not UTF-8 text"):
        gather((), path, {})


@pytest.mark.parametrize("way", ["file", "pipe", "nothing", "an empty pipe"])
def test_what_waits_on_stdin_and_is_not_read_is_said(process, tmp_path, way):
    """Without waiting for it: a pipe that nobody writes to must not hold a run up."""
    path = tmp_path / "words.txt"
    path.write_text("from stdin\n")
    reading, writing = os.pipe()
    try:
        if way == "pipe":
            os.write(writing, b"from stdin\n")
        with path.open() as file:
            stdin = {"file": file, "nothing": subprocess.DEVNULL}.get(way, reading)
            child = process("run", "--model", "m", "--prompt", "a b", stdin=stdin)
            out, errors = child.communicate(timeout=60)
    finally:
        os.close(reading)
        os.close(writing)
    assert child.returncode == 0
    assert "from stdin" not in out
    said = "kvbaton: stdin is not read, because --prompt is given\n"
    assert errors == (said if way in ("file", "pipe") else "")
