"""The real machines in any of the model's systems, searched to the end: ``python search.py [NAME | NAME+ ...]``.

Without names: all of them, which takes long.  ``NAME+``: D's engine answers, and closed connections become quiet, in
moves of their own.  The tests search the small ones.
"""

from __future__ import annotations

import sys


def main(names: list[str]) -> int:
    import conftest  # noqa: F401 - puts the model on the import path

    # isort: split
    import check
    import oracle
    from configs import BY_NAME

    bad = 0
    for name in names or [each + mark for each in BY_NAME for mark in ("", "+")]:
        config = BY_NAME[name.rstrip("+")]
        with oracle.real_machines(config, delayed=name.endswith("+")):
            verdict = check.check(config)
        print(("later: " if name.endswith("+") else "") + str(verdict), flush=True)
        bad |= verdict.problem is not None
    return bad


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
