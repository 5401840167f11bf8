"""The contract, over UCX: in one process, between two, and whole hand-offs."""

from kvbaton_conformance import ConnectorConformance
from kvbaton_conformance.suite.levels import ConnectorLevel


class TestUcx(ConnectorConformance):
    connector = "ucx"


class TestUcxOnDevice(ConnectorLevel):
    """In device memory, between two processes."""

    connector = "ucx"
    connector_memory = "cuda"
