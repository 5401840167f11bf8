"""The contract, over both kinds of sockets."""

from kvbaton_conformance import ConnectorConformance


class TestUnix(ConnectorConformance):
    connector = "example_stream"


class TestTcp(ConnectorConformance):
    connector = "example_stream"
    connector_options = {"family": "tcp"}
