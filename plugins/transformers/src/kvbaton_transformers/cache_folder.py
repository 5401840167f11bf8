"""Where checkpoints that were converted are kept, and what a conversion that was killed leaves there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kvbaton.doctor.leftovers import Leftover

#: The folder, in the cache, of converted checkpoints; beside each is its lock, ``NAME.lock``.
CONVERTED: Final = "gguf"
#: How the name of one begins that is being converted.
CONVERTING: Final = ".converting-"


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/kvbaton``, else ``~/.cache/kvbaton``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvbaton"


def leftovers() -> list[Leftover]:
    """Conversions, each in use for as long as any lock beside it is held: which one is its own, it does not say."""
    from kvbaton.doctor.leftovers import Leftover

    folder = cache_folder() / CONVERTED
    halves = sorted(folder.glob(f"{CONVERTING}*"))
    locks = tuple(sorted(folder.glob("*.lock")))  # afterwards: whoever has begun one of them had its lock before
    return [Leftover(path, "half converted model", locks=locks) for path in halves]
