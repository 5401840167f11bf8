"""What the tests of this plugin share."""

import sys
from pathlib import Path

# modules of this folder are named to other processes, which get our path
sys.path.insert(0, str(Path(__file__).parent))
