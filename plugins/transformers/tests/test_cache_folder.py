"""A conversion that was killed is known for its own, and left alone while one is under way."""

from pathlib import Path

from filelock import FileLock

from kvbaton.doctor.leftovers import Places, clean
from kvbaton_transformers import plugin


def test_what_a_killed_conversion_left_is_removed_once_no_other_is_under_way(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "kvbaton" / "gguf"
    half, whole = folder / ".converting-abc", folder / "0123-1"
    for made in (half, whole):
        made.mkdir(parents=True)
        (made / "model.safetensors").touch()
    places = Places(shared_memory=tmp_path / "shm", plugins=plugin.leftovers)
    with FileLock(folder / "0123-1.lock"):
        (kept,) = clean(places, dry_run=False)
        assert (kept.path, kept.fate) == (str(half), "kept")
    (removed,) = clean(places, dry_run=False)
    assert (removed.path, removed.fate) == (str(half), "removed")
    assert whole.exists()


def test_a_conversion_that_begins_while_it_is_looked_for_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "kvbaton" / "gguf"
    folder.mkdir(parents=True)
    (folder / "4567-1.lock").touch()  # of one that is long over
    begun = FileLock(folder / "0123-1.lock")
    looked = Path.glob

    def glob(self, pattern):
        """Between the first look into the folder and the second one it begins."""
        found = list(looked(self, pattern))
        if not begun.is_locked:
            begun.acquire()
            (folder / ".converting-abc").mkdir()
        return found

    monkeypatch.setattr(Path, "glob", glob)
    for _ in range(2):
        assert {one.fate for one in clean(Places(shared_memory=tmp_path, plugins=plugin.leftovers), dry_run=False)} <= {
            "kept"
        }
    begun.release()


def test_an_empty_cache_has_none(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert plugin.leftovers() == []
