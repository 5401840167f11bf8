"""An interrupt that Python drops."""

import os
import signal
import sys

import pytest

from kvbaton_conformance.interrupt import Interrupt


class Does:
    """Something, in its destructor."""

    def __init__(self, what):
        self.what = what

    def __del__(self):
        self.what()


@pytest.fixture
def ctrl_c():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield lambda: os.kill(os.getpid(), signal.SIGINT)
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


def test_it_is_remembered_and_no_fault_of_anybody(ctrl_c, monkeypatch):
    told = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: told.append(unraisable.exc_type))
    interrupt = Interrupt()
    with interrupt.heard():
        interrupt.check()
        Does(ctrl_c)
        assert interrupt.seen
        assert told == []
        Does(lambda: 1 / 0)
        assert told == [ZeroDivisionError]
        with pytest.raises(KeyboardInterrupt):
            interrupt.check()
        interrupt.check()  # once: from here on it is pytest's


def test_whoever_handles_ctrl_c_by_himself_is_left_to_it(ctrl_c):
    heard = []
    signal.signal(signal.SIGINT, lambda *_: heard.append(True))
    interrupt = Interrupt()
    with interrupt.heard():
        ctrl_c()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    assert (heard, interrupt.seen) == ([True], False)
