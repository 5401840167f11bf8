"""C1.4: a start of a process is not the next one."""

from __future__ import annotations

import pytest

from kvbaton_conformance.clauses import require
from kvbaton_conformance.harness import Pair
from kvbaton_conformance.suite.topic import ConnectorTopic, Ends


class Epochs(ConnectorTopic):
    """C1.4: an endpoint is that of one start; what answers under the same name later is somebody else."""

    @pytest.mark.clause("C1.4", "T2")
    def test_an_endpoint_of_an_earlier_start_reaches_nobody(self, ends: Ends) -> None:
        """A source has the endpoint of a target that has ended; another start of that target is there and looks for
        the source.

        Troubleshooting:
        - up: the address outlives the process (a fixed path or port), and the hello names the stage but not its epoch.
        """
        source = ends.end("prefill-0", connect_deadline=1.0)
        former = ends.end("decode-0")
        endpoint = former.guard.endpoint()
        ends.lose(former)
        present = ends.end("decode-0", connect_deadline=1.0)
        source.guard.connect(endpoint)
        present.guard.connect(source.guard.endpoint())
        pair = Pair(source, present)
        pair.pump_until(lambda: source.told_down(former.peer) or source.is_up(former.peer), "T2: down by the deadline")
        require(
            not source.is_up(former.peer) and not any(event.up for event in source.peers), "C1.4",
            "a process that has ended is up", expected="down", seen=[str(event) for event in source.peers],
            look="what the hello is compared with",
        )  # fmt: skip
