"""docs/protocol.md shows the tables that the machines enforce."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_page_is_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "protocol_tables.py", "--check"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
