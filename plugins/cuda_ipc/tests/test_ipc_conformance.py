"""The kit, on a device that is none: everything but the device is real, two processes and UCX included."""

import sys
from pathlib import Path

from kvbaton_conformance import ConnectorConformance

sys.path.insert(0, str(Path(__file__).parent))

from fake_plugin import FakePlugin


class TestIpcWithoutDevice(ConnectorConformance):
    connector = FakePlugin()
