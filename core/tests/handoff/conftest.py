"""Puts the model of the protocol, and the adapter that presents the real machines to it, on the import path."""

import sys
from pathlib import Path

HERE = Path(__file__).parent

for folder in (HERE / "model", HERE):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
