"""``KEY=VALUE`` on the command line."""

from __future__ import annotations

from collections.abc import Iterable

from kvbaton.errors import SettingsError


def assignments(flag: str, texts: Iterable[str]) -> list[tuple[str, str]]:
    """Key and value of each of ``texts``, which followed ``flag``; a value may hold further equals signs.

    Raises :class:`~kvbaton.errors.SettingsError` for a text without a key or an equals sign.
    """
    found = []
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise SettingsError(f'{flag} "{text}": write KEY=VALUE', key="", origin=None)
        found.append((key.strip(), value))
    return found
