"""What a model's name means, and what is said of one that means none, before torch is imported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvbaton.errors import ModelError, ModelNotFound
from kvbaton_transformers import sources


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current one, with something of every kind in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("empty", "whole", "weightless", "listed", "a b ü", "gguf", "models--a--b", "folder/config.json"):
        Path(name).mkdir(parents=True)
    for name in ("whole", "weightless", "a b ü", "models--a--b"):
        Path(name, "config.json").write_text('{"model_type": "llama"}')
    for name in ("whole", "listed", "a b ü", "folder"):
        Path(name, "model.safetensors").touch()
    Path("listed/config.json").write_text("[]")
    Path("gguf/m.gguf").write_bytes(b"GGUF" + bytes(20))
    Path("page.gguf").write_text("<html>")
    Path("notes.txt").write_text("notes")
    Path("large.json").write_bytes(b"{" + b" " * (1 << 24) + b"}")
    Path("deep.json").write_text("[" * 100_000)
    Path("loop").symlink_to("loop")
    os.mkfifo("fifo")
    return tmp_path


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("whole/nothing", 'no checkpoint at whole/nothing: there is no such file or folder .*FOLDER, then give FOLDER'),
        ("./nothing", r"no checkpoint at \./nothing: there is no such file or folder \(looked in [^)]*\)"),
        ("notes.txt/x/y", "no checkpoint at notes.txt/x/y: there is no such file or folder .*"),
        ("~nobody-of-that-name/x", "no checkpoint at ~nobody-of-that-name/x: nobody here has that home folder"),
        (" ", 'no model " ": neither a path nor a known name.* Otherwise give the path of .*'),
        ("random:", r"random:: there is no configuration; give a model's config\.json.*"),
        ("random:empty", r"random:empty: there is no configuration at empty/config\.json; give .*"),
    ],
)  # fmt: skip
def test_what_is_not_there(folder: Path, source: str, message: str) -> None:
    for ask in (sources.find, sources.checkpoint):
        with pytest.raises(ModelNotFound) as caught:
            ask(source)
        assert re.fullmatch(message, str(caught.value))


UNREADABLE = [
    ("loop", "loop cannot be read: Too many levels of symbolic links"),
    ("loop/x.gguf", "loop/x.gguf cannot be read: Too many levels of symbolic links"),
    ("x" * 300, "x{300} cannot be read: File name too long"),
    ("\0", "\0 cannot be read: embedded null byte"),
    ("random:loop", "loop cannot be read: Too many levels of symbolic links"),
]
NO_FILE = [
    ("notes.txt", "notes.txt is not a checkpoint: expected a folder with .*"),
    ("fifo", "fifo is not a checkpoint: expected a folder with .*"),
    ("page.gguf", r"page\.gguf is damaged or incomplete: it does not begin as a GGUF file does\. Get .*"),
]
NO_CONFIGURATION = [
    *(
        (f"random:{path}", rf"random:{path}: \S+ is no configuration: expected a model's config\.json, .*")
        for path in ("notes.txt", "listed", "large.json", "deep.json", "fifo", "folder")
    ),
    ("random:whole#x", 'random:whole#x: the seed after "#" must be a whole number below .*, not "x"'),
    (f"random:whole#{1 << 64}", "random:whole#1.*: the seed .* must be a whole number below .*"),
    ("random:whole#" + "9" * 5000, "random:whole#9*: the seed .* must be a whole number below .*"),
]
NO_FOLDER = [
    ("empty", r"empty is not a checkpoint: it has no config\.json; give the folder that has one"),
    ("gguf", r"gguf is not a checkpoint: it has no config\.json; for the GGUF file in it, give gguf/m\.gguf"),
    ("listed", "listed is damaged or incomplete: its configuration .* is no JSON object. Get .*"),
    ("folder", "folder is damaged or incomplete: its configuration .* is no JSON object. Get .*"),
    ("weightless", r"weightless is not a checkpoint: it has no \*\.safetensors\. .*"),
]


@pytest.mark.parametrize(("source", "message"), [*UNREADABLE, *NO_FILE, *NO_CONFIGURATION, *NO_FOLDER])
def test_what_is_there_and_is_no_checkpoint(folder: Path, source: str, message: str) -> None:
    if (source, message) in NO_FOLDER:
        assert sources.find(source) == sources.Folder(Path(source)), "a tokenizer may be in it"
    else:
        with pytest.raises(ModelError, match=re.escape(source.removeprefix("random:").partition("#")[0])):
            sources.find(source)
    with pytest.raises(ModelError) as caught:
        sources.checkpoint(source)
    assert not isinstance(caught.value, ModelNotFound)
    assert re.fullmatch(message, str(caught.value))


@pytest.mark.parametrize("refused", ["whole", "whole/config.json", "gguf/m.gguf"])
def test_what_may_not_be_read(folder: Path, monkeypatch: pytest.MonkeyPatch, refused: str) -> None:
    """Root may read everything, so that the system is played."""
    wanted = refused.removesuffix("/config.json")
    kept = {name: getattr(Path, name) for name in ("open", "iterdir")}

    def refuse(name: str) -> object:
        def call(path: Path, *arguments: object, **more: object) -> object:
            if str(path) == refused:
                raise PermissionError(13, "Permission denied", refused)
            return kept[name](path, *arguments, **more)

        return call

    for name in kept:
        monkeypatch.setattr(Path, name, refuse(name))
    with pytest.raises(ModelError) as caught:
        sources.checkpoint(wanted)
    assert str(caught.value) == f"{refused} cannot be read: Permission denied"


def test_what_is_right_is_taken(folder: Path) -> None:
    whole, gguf = folder / "whole", folder / "gguf/m.gguf"
    for source in ("whole", "./whole", "empty/../whole", "~/whole", str(whole)):
        assert sources.checkpoint(source) == sources.Folder(Path(source).expanduser())
        assert sources.checkpoint(f"random:{source}#7") == sources.Configuration(
            Path(source).expanduser() / "config.json", 7
        )
    for source in ("gguf/m.gguf", "~/gguf/m.gguf", str(gguf)):
        assert sources.checkpoint(source) == sources.Gguf(Path(source).expanduser())
    assert sources.checkpoint("a b ü") == sources.Folder(Path("a b ü"))
    assert sources.checkpoint("random:models--a--b/config.json") == sources.Configuration(
        Path("models--a--b/config.json"), 0
    )
    assert sources.checkpoint(f"random:whole#{(1 << 64) - 1}").seed == (1 << 64) - 1  # type: ignore[union-attr]
    assert sources.checkpoint("tiny-llama") == sources.Tiny("tiny-llama")


def test_it_is_said_before_anything_large_is_imported(folder: Path) -> None:
    """To import torch and transformers takes seconds."""
    wrong = [source for source, _ in (*NO_FILE, *NO_CONFIGURATION, *NO_FOLDER)]
    wrong += ["random:/missing", "/missing", "misspelt", "random:/missing#x"]
    script = (
        "import sys\n"
        "from kvbaton.errors import ModelError\n"
        "from kvbaton_transformers import plugin\n"
        "for source in sys.argv[1:]:\n"
        "    try:\n"
        "        plugin.check(source, plugin.Options())\n"
        "    except ModelError:\n"
        "        print('refused')\n"
        "for source in ('misspelt', 'page.gguf'):\n"
        "    try:\n"
        "        plugin.tokenizer(source, plugin.Options())\n"
        "    except ModelError:\n"
        "        print('refused')\n"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script, *wrong], capture_output=True, text=True, timeout=60, check=True
    )  # fmt: skip
    assert ran.stdout.split() == ["refused"] * (len(wrong) + 2) + ["[]"]
