"""The contract, over UCX: in one process, between two, and whole hand-offs."""

from kvbaton_conformance import ConnectorConformance


class TestUcx(ConnectorConformance):
    connector = "ucx"


class TestUcxOnDevice(ConnectorConformance):
    """In device memory, between two processes."""

    connector = "ucx"
    connector_memory = "cuda"
