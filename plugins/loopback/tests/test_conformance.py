from kvbaton_conformance import ConnectorConformance


class TestLoopback(ConnectorConformance):
    connector = "loopback"
