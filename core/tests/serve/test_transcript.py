"""Text up to a stop text, whatever pieces it comes in."""

from hypothesis import given
from hypothesis import strategies as st

from kvbaton.serve.transcript import Transcript


class Characters:
    """Every character is a token."""

    def encode(self, text):
        return [ord(character) for character in text]

    def decode(self, token_ids):
        return "".join(map(chr, token_ids))


def reference(text, stops):
    """The text before the stop text that is complete first."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3), st.data())
def test_the_text_ends_before_the_first_stop_text(text, stops, data):
    transcript, tokens, pieces = Transcript(Characters(), stops), Characters().encode(text), []
    while tokens and not transcript.stopped:
        count = data.draw(st.integers(1, 5))
        pieces.append(transcript.push(tokens[:count]))
        del tokens[:count]
    pieces.append(transcript.finish())
    assert ("".join(pieces), transcript.stopped) == reference(text, stops)


def test_what_may_become_a_stop_text_is_held_back_and_no_more():
    transcript = Transcript(Characters(), ["STOP"])
    assert transcript.push(Characters().encode("a ST")) == "a "
    assert transcript.push(Characters().encode("AR ")) == "STAR "
    assert transcript.push(Characters().encode("STOP more")) == ""
    assert transcript.stopped
    assert (transcript.finish(), transcript.tokens) == ("", 16)
