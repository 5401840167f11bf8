"""T5: how an accepted chunk ends at its source."""

from __future__ import annotations

import pytest

from kvbaton_conformance.clauses import require
from kvbaton_conformance.harness import Pair, segments
from kvbaton_conformance.suite.topic import ConnectorTopic


class Completion(ConnectorTopic):
    """T5: each accepted chunk ends in exactly one completion, which says what is quiet."""

    @pytest.mark.clause("T5")
    def test_a_chunk_ends_once(self, pair: Pair) -> None:
        """One chunk, then many passes.

        Troubleshooting:
        - twice: the completion is queued by the thread that moves bytes *and* found again by poll;
        - never: the handle is forgotten before it was seen terminal.
        """
        sent = pair.send(segments((0, 0, 64)), segments((1, 64, 64)))
        pair.pump_until(lambda: sent.received and sent.done, "T5: one chunk is received and done")
        pair.pump_idle()
        require(
            len(sent.completions) == 1, "T5", "a chunk had more than one completion",
            expected="one", seen=[str(one) for one in sent.completions], look="what poll() collects completions from",
        )  # fmt: skip
