"""The pair is bounded, closes what it opened, and its messages say what was seen."""

import threading

import pytest

from kvbaton.connector import API_VERSION, Availability, Outcome
from kvbaton_conformance.harness import ConditionNotReached, open_pair, segments
from kvbaton_conformance.scripted_connector import ScriptedConnector
from kvbaton_loopback import plugin
from kvbaton_loopback.options import LoopbackOptions


class SilentPlugin:
    """A transport that takes everything and says nothing."""

    name = "silent"
    api_version = API_VERSION
    Options = LoopbackOptions

    def probe(self, need):
        return Availability(True)

    def open(self, options, context):
        return ScriptedConnector()


@pytest.mark.parametrize("connector", ["loopback", "kvbaton_loopback:plugin", plugin])
def test_a_transport_is_named_or_given(connector):
    with open_pair(connector, {"seed": 4}) as pair:
        sent = pair.send(segments((0, 0, 64)), segments((1, 64, 64)))
        pair.pump_until(lambda: sent.received and sent.done, "T5: one chunk")
        pair.target.memory.check(sent.expected)
        assert [completion.outcome for completion in sent.completions] == [Outcome.DONE]


def test_a_bound_that_passes_says_what_was_seen():
    with open_pair(SilentPlugin(), connect=False) as pair:
        with pytest.raises(ConditionNotReached, match=r"^T2: up: not reached within 0.05 s(.|\n)*decode-0@"):
            pair.pump_until(lambda: False, "T2: up", bound=0.05)


def test_everything_is_closed_also_after_a_failure():
    before = set(threading.enumerate())
    opened = open_pair(plugin, {"stall_chunks": [0]})
    pair = opened.__enter__()
    assert pair.send(segments((0, 0, 64)), segments((1, 64, 64))).accepted
    assert not opened.__exit__(RuntimeError, RuntimeError("in the test"), None)  # and it is not swallowed
    assert pair.source.guard.closed
    assert pair.target.guard.closed
    assert set(threading.enumerate()) == before
