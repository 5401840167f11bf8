"""The page of the NIXL plugin says what its options are, and what else an operator can set."""

import json
from pathlib import Path

from kvbaton.connector import MemoryKind
from kvbaton.settings import Settings
from kvbaton_nixl import link
from kvbaton_nixl.options import NixlOptions

README = Path(__file__).parents[1] / "plugins" / "nixl" / "README.md"


def rows(heading: str) -> dict[str, str]:
    """First and second cell of each row of the tables behind ``## heading``, without their backticks."""
    section = README.read_text().split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    cells = [line.split(" | ") for line in section.splitlines() if line.startswith("| `")]
    return {first.strip("| `"): second.strip("`") for first, second, *_ in cells}


def test_the_page_has_every_option_with_its_default() -> None:
    said = rows("Options")
    for name, field in NixlOptions.model_fields.items():
        default = field.get_default(call_default_factory=True)
        shown = "by memory" if default is None else json.dumps(default).strip('"')
        assert said.pop(name) == shown, name
    units = {"MiB": 1 << 20, "GiB": 1 << 30, "s": 1}
    assert said
    settings = Settings(model="any").model_dump()
    for name, shown in said.items():
        group, _, setting = name.partition(".")
        number, _, unit = shown.partition(" ")
        assert settings[group][setting] == float(number) * units.get(unit, 1), name


def test_the_defaults_by_memory_are_those_that_are_said() -> None:
    page, fields = README.read_text(), NixlOptions.model_fields
    words: tuple[tuple[MemoryKind, str], ...] = (("host", "host"), ("cuda", "device"))
    for kind, word in words:
        for name, nbytes in (("packing_below", link.PACKING_BELOW[kind]), ("staging_bytes", link.STAGING_BYTES[kind])):
            size = f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"
            for said in (page, fields[name].description or ""):
                assert f"{size} in {word} memory" in said, name
