"""A conversion that was killed is known for its own, and left alone while one is under way."""

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


def test_an_empty_cache_has_none(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert plugin.leftovers() == []
