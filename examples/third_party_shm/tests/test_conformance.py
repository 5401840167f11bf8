"""The contract."""

from kvbaton_conformance import ConnectorConformance


class TestShm(ConnectorConformance):
    connector = "example_shm"
