"""The connector that ``--connector`` names."""

from kvbaton_conformance.suite.levels import ConnectorConformance


class TestConnector(ConnectorConformance):
    """Set nothing: the command line names the connector."""
