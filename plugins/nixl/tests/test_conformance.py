from kvbaton.connector import Availability
from kvbaton_conformance import ConnectorConformance, HandoffConformance
from kvbaton_conformance.suite.levels import ConnectorLevel
from kvbaton_nixl import NixlPlugin


class TestNixl(ConnectorConformance):
    connector = "nixl"


class Apart(NixlPlugin):
    """NIXL for stages in processes of their own, as its users have it."""

    def probe(self, need):
        if need.reach == "same_process":
            return Availability(False, "what is judged here is judged between processes", "")
        return super().probe(need)


#: Every chunk packed, into few slots and small ones: most have several parts, and wait for room.  With two slots the
#: processes take turns so often in a flood of chunks that a busy machine is late.
PACKED = {"packing": "always", "staging_bytes": 4096, "staging_slots": 8}


class TestNixlPacked(ConnectorLevel):
    connector = Apart()
    connector_options = PACKED


class TestHandOffPacked(HandoffConformance):
    connector = "nixl"
    connector_options = PACKED


class TestNixlOnDevice(ConnectorConformance):
    """In device memory of one GPU, between two processes."""

    connector = "nixl"
    connector_memory = "cuda"
