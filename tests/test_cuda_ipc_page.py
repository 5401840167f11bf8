"""The page of the plugin for one host says what the options of ``ucx`` are."""

import json
from pathlib import Path

from kvbaton_cuda_ipc import ucx
from kvbaton_cuda_ipc.options import UcxOptions

README = Path(__file__).parents[1] / "plugins" / "cuda_ipc" / "README.md"


def test_the_page_has_every_option_with_its_default() -> None:
    section = README.read_text().split("## ucx\n", 1)[1].split("\n### ", 1)[0]
    cells = [line.split(" | ") for line in section.splitlines() if line.startswith("| `")]
    said = {first.strip("| `"): second.strip("`") for first, second, *_ in cells}
    for name, field in UcxOptions.model_fields.items():
        default = field.get_default(call_default_factory=True)
        shown = "by memory" if default is None else json.dumps(default).strip('"')
        assert said.pop(name) == shown, name
    assert not said


def test_the_defaults_by_memory_are_those_that_are_said() -> None:
    for kind, word in (("host", "host"), ("cuda", "device")):
        size = f"{ucx.SLOT_BYTES[kind] >> 20} MiB in {word} memory"
        assert size in README.read_text()
        assert size in (UcxOptions.model_fields["slot_bytes"].description or "")
