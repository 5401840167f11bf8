from kvbaton_conformance import ConnectorConformance


class TestNixl(ConnectorConformance):
    connector = "nixl"
