"""Text as it comes: nothing lost, nothing mixed, no half characters."""

import io
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from kvbaton.cli.screen import Front, PipeScreen, SilentScreen, Tally, TerminalScreen, screen_for
from kvbaton.detokenizer import Detokenizer
from kvbaton.hooks import Hooks


class Bytes:
    """A byte-level tokenizer: one token may be a part of a character."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids) -> str:
        return bytes(token_ids).decode("utf-8", errors="replace")


class Spaces:
    """Like SentencePiece: the first token of a text loses its space."""

    words = (" the", " cat", "s", " sat", ".", "\n")

    def decode(self, token_ids) -> str:
        return "".join(self.words[token] for token in token_ids).removeprefix(" ")


@given(st.text(max_size=40), st.data())
def test_pieces_concatenate_to_the_text_and_hold_no_half_character(text, data):
    tokens = Bytes().encode(text)
    detokenizer, pieces = Detokenizer(Bytes()), []
    while tokens:
        count = data.draw(st.integers(1, 5))
        pieces.append(detokenizer.push(tokens[:count]))
        tokens = tokens[count:]
    pieces.append(detokenizer.finish())
    assert "".join(pieces) == text
    if "\N{REPLACEMENT CHARACTER}" not in text:
        assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


@given(st.lists(st.integers(0, 5), max_size=30))
def test_spaces_between_words_survive_token_by_token(tokens):
    detokenizer = Detokenizer(Spaces())
    pieces = [detokenizer.push([token]) for token in tokens]
    assert "".join([*pieces, detokenizer.finish()]) == Spaces().decode(tokens)


def test_an_unfinished_character_at_the_very_end_is_shown_as_it_is():
    detokenizer = Detokenizer(Bytes())
    assert detokenizer.push([0x41, 0xC3]) == ""
    assert detokenizer.finish() == "A\N{REPLACEMENT CHARACTER}"


def test_the_work_per_token_does_not_grow_with_the_text():
    """Counts tokens decoded: a long answer must not be decoded anew for each of its tokens."""
    decoded = []

    class Counting(Bytes):
        def decode(self, token_ids):
            decoded.append(len(token_ids))
            return super().decode(token_ids)

    detokenizer = Detokenizer(Counting())
    for token in b"abcdefgh" * 250:
        detokenizer.push([token])
    assert max(decoded) <= 4


class Recorder(SilentScreen):
    def __init__(self) -> None:
        self.shown = ""

    def header(self, line: str) -> None:
        self.shown += f"<{line}>"

    def text(self, piece: str) -> None:
        self.shown += piece

    def end_of_text(self) -> None:
        self.shown += "|"


@given(st.data())
def test_every_text_is_shown_whole_under_its_header_in_any_interleaving(data):
    names = ["a", "b", "c", "d"]
    left = {name: data.draw(st.integers(0, 4), label=name) for name in names}
    texts = {name: "".join(f"{name}{i}" for i in range(left[name])) for name in names}
    said = dict.fromkeys(names, 0)
    recorder = Recorder()
    front = Front(recorder, {name: name.upper() for name in names})
    running = set(names)
    while running:
        name = data.draw(st.sampled_from(sorted(running)))
        if said[name] < left[name]:
            front.text(name, f"{name}{said[name]}")
            said[name] += 1
        else:
            running.remove(name)
            front.finish(name)
    parts = recorder.shown.removesuffix("|").split("|")
    assert sorted(parts) == sorted(f"<{name.upper()}>{texts[name]}" for name in names)


def test_text_is_shown_as_it_comes_and_not_at_the_end():
    recorder = Recorder()
    front = Front(recorder, {"a": "A", "b": "B"})
    front.text("b", "one ")
    front.text("a", "waits ")
    front.text("b", "two")
    assert recorder.shown == "<B>one two"
    front.finish("b")
    assert recorder.shown == "<B>one two|<A>waits "
    front.text("a", "no more")
    assert recorder.shown.endswith("<A>waits no more")


def test_a_single_request_has_no_header():
    recorder = Recorder()
    front = Front(recorder, {"a": ""})
    front.text("a", "x")
    front.finish("a")
    assert recorder.shown == "x|"


def test_the_progress_line_counts_states_from_milestones():
    tally = Tally()
    hooks = Hooks([tally])
    for name in "abcd":
        tally.add(name)

    def reach(request, milestone):
        hooks.tell("kvbaton_milestone", transfer="0" * 32, request=request, stage="s", milestone=milestone, at=0.0)

    reach("a", "reserved")
    reach("b", "activated")
    reach("b", "received")  # late news changes nothing
    reach("b", "retired")
    reach("unknown", "reserved")
    tally.finish("c")
    reach("c", "reserved")
    tally.tokens = 12
    assert tally.line().startswith("4 requests: 1 waiting, 1 prefilling, 1 decoding, 1 done · 12 tokens · ")
    assert hooks.failures == {}


def test_a_terminal_shows_complete_lines_and_a_live_rest():
    out = io.StringIO()
    screen = TerminalScreen(Console(file=out, force_terminal=True, width=60))
    screen.progress("1 request: 1 decoding")
    screen.header("[1] [bold]prompt[/]")
    screen.text("first [i]line[/]\nsec")
    screen.text("ond [red]line[/]")
    screen.end_of_text()
    screen.close()
    assert "1 request: 1 decoding" in out.getvalue()
    for line in (
        "[1] [bold]prompt[/]",
        "first [i]line[/]",
        "second [red]line[/]",
    ):  # the model's brackets are no markup
        assert line in out.getvalue()


def test_what_a_model_writes_does_nothing_to_the_terminal():
    out = io.StringIO()
    screen = TerminalScreen(Console(file=out, force_terminal=True, width=60))
    screen.header("[1] rings\a")
    screen.text("clears \x1b[2J and \x9b31m\n\tkeeps this")
    screen.end_of_text()
    screen.close()
    shown = out.getvalue()
    assert "\x1b[2J" not in shown.replace("\x1b[2K", "")
    assert "\a" not in shown
    assert "\x9b" not in shown
    assert "keeps this" in shown


def test_where_stdout_is_no_terminal_text_goes_there_at_once(capsys):
    screen = screen_for(quiet=False)
    assert isinstance(screen, PipeScreen)
    screen.progress("not here")
    screen.text("a [b] ")
    assert capsys.readouterr() == ("a [b] ", "")
    screen.end_of_text()
    screen.close()
    assert capsys.readouterr().out == "\n"


@pytest.mark.parametrize("quiet", [True, False])
def test_progress_is_shown_on_a_terminal_stderr_only(quiet, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    screen = screen_for(quiet=quiet)
    screen.progress("2 requests: 2 decoding")
    screen.text("answer")
    screen.close()
    shown = capsys.readouterr()
    assert "2 requests: 2 decoding" in shown.err
    assert shown.out == ("" if quiet else "answer")
