"""Short bounds for an end that hangs, which a busy machine cannot keep from coming so far."""

import time

from kvbaton.pair import pair, process
from kvbaton.pair.words import Send


def with_what_hangs(monkeypatch, reached):
    """Its answer to an order to send is waited for from when its transport has touched the file ``reached``."""
    hear = process.EndProcess.hear

    def from_then_on(self, order, bound, other=None):
        until = time.monotonic() + 60
        while isinstance(order, Send) and not reached.exists():
            assert time.monotonic() < until, "it did not come so far"
            time.sleep(0.01)
        return hear(self, order, bound, other)

    monkeypatch.setattr(process.EndProcess, "hear", from_then_on)
    monkeypatch.setattr(process, "_LAST_WORDS", 60.0)
    monkeypatch.setattr(pair, "GRACE", 0.5)
