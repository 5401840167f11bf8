from kvbaton_conformance import ConnectorConformance


class TestNixl(ConnectorConformance):
    connector = "nixl"


class TestNixlOnDevice(ConnectorConformance):
    """In device memory of one GPU, between two processes."""

    connector = "nixl"
    connector_memory = "cuda"
