"""Find the function that an entry names."""

from __future__ import annotations

import importlib
from typing import cast

from kvbaton.errors import ConfigurationError
from kvbaton.launch import Entry


def resolve(name: str) -> Entry:
    """The function behind ``"module:function"``.

    Raises: ConfigurationError if the name has another form, the module cannot be imported, or it has no such function.
    """
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        raise ConfigurationError(f'a stage\'s entry must be named "module:function", not "{name}"', entry=name)
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigurationError(f'the stage\'s entry "{name}" cannot be imported: {error}', entry=name) from error
    found = getattr(module, attribute, None)
    if not callable(found):
        raise ConfigurationError(f'the module of the stage\'s entry "{name}" has no function "{attribute}"', entry=name)
    return cast(Entry, found)
