"""What dead processes left is removed, and nothing else is touched."""

import fcntl
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from kvbaton.cli import conformance
from kvbaton.control import curve, private_directory
from kvbaton.doctor import leftovers
from kvbaton.doctor.leftovers import Leftover, Places, clean


@pytest.fixture
def dead():
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.fixture
def places(tmp_path):
    (tmp_path / "tmp").mkdir()
    (tmp_path / "shm").mkdir()
    return Places(folders=(tmp_path / "tmp",), shared_memory=tmp_path / "shm")


def fates(places, dry_run=False):
    return {Path(one.path).name: one.fate for one in clean(places, dry_run=dry_run)}


def reason(places, name):
    (found,) = [one for one in clean(places, dry_run=True) if Path(one.path).name == name]
    return found.why


def directory(places, name):
    made = places.folders[0] / name
    made.mkdir(mode=0o700)
    (made / "control.sock").write_text("x")
    return made


def test_what_a_dead_process_left_is_removed_and_a_dry_run_removes_nothing(places, dead):
    made = directory(places, f"kvbaton-{dead}-abcd1234")
    shared = places.shared_memory / f"kvbaton-mine-{dead}-1-abc"
    shared.write_bytes(b"1234")
    expected = {made.name: "would be removed", shared.name: "would be removed"}
    assert fates(places, dry_run=True) == expected
    assert (made / "control.sock").exists()
    assert shared.exists()
    (first, second) = clean(places, dry_run=False)
    assert (first.fate, first.nbytes, second.fate, second.nbytes) == ("removed", 1, "removed", 4)
    assert f"process {dead} is gone" in first.why
    assert not made.exists()
    assert not shared.exists()
    assert clean(places, dry_run=False) == []


def test_what_a_living_process_has_is_kept(places):
    made = directory(places, f"kvbaton-{os.getpid()}-abcd1234")
    (places.shared_memory / f"kvbaton-mine-{os.getpid()}-abc").touch()
    assert set(fates(places).values()) == {"kept"}
    assert f"process {os.getpid()} lives" in reason(places, made.name)
    assert made.exists()


def test_a_lock_that_is_held_keeps_it_although_its_number_is_a_dead_ones(places, dead):
    # as where its maker has another numbering of processes: a container
    made = directory(places, f"kvbaton-{dead}-abcd1234")
    lock = os.open(made, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert fates(places) == {made.name: "kept"}
    assert "its lock is held" in reason(places, made.name)
    os.close(lock)
    assert fates(places) == {made.name: "removed"}


def test_a_number_that_a_younger_process_has_got_does_not_keep_it(places):
    made = directory(places, f"kvbaton-{os.getpid()}-abcd1234")
    began = psutil.Process().create_time()
    proc = fake_proc(places, os.getpid(), began + 3600)
    assert fates(Places(places.folders, places.shared_memory, proc=proc)) == {made.name: "removed"}


def test_one_that_is_as_old_as_what_it_made_keeps_it(places):
    made = directory(places, f"kvbaton-{os.getpid()}-abcd1234")
    proc = fake_proc(places, os.getpid(), made.stat().st_mtime - 0.5)
    assert fates(Places(places.folders, places.shared_memory, proc=proc)) == {made.name: "kept"}


def fake_proc(places, pid, began, state="S"):
    proc = places.folders[0].parent / "proc"
    (proc / str(pid)).mkdir(parents=True)
    boot = 1_000_000_000
    (proc / "stat").write_text(f"cpu 1 2 3\nbtime {boot}\n")
    ticks = int((began - boot) * os.sysconf("SC_CLK_TCK"))
    fields = [state, *["0"] * 18, str(ticks), "0"]
    (proc / str(pid) / "stat").write_text(f"{pid} (a (strange) name) {' '.join(fields)}\n")
    return proc


def test_a_process_of_which_only_the_entry_is_left_is_gone(places):
    made = directory(places, f"kvbaton-{os.getpid()}-abcd1234")
    proc = fake_proc(places, os.getpid(), made.stat().st_mtime - 5, state="Z")
    assert fates(Places(places.folders, places.shared_memory, proc=proc)) == {made.name: "removed"}


def test_a_process_that_cannot_be_looked_at_keeps_it(places):
    made = directory(places, f"kvbaton-{os.getpid()}-abcd1234")
    proc = fake_proc(places, os.getpid(), 0)
    (proc / "stat").write_text("nothing\n")
    assert fates(Places(places.folders, places.shared_memory, proc=proc)) == {made.name: "kept"}


def test_shared_memory_that_somebody_has_open_is_kept(places, dead):
    shared = places.shared_memory / f"kvbaton-mine-{dead}-abc"
    with shared.open("wb"):
        assert fates(places) == {shared.name: "kept"}
        assert f"process {os.getpid()} has it open" in reason(places, shared.name)


def test_links_are_neither_followed_nor_removed(places, dead, tmp_path):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("x")
    link = places.folders[0] / f"kvbaton-{dead}-abcd1234"
    link.symlink_to(precious)
    assert fates(places) == {link.name: "kept"}
    assert reason(places, link.name) == "it is a link"
    link.unlink()
    made = directory(places, f"kvbaton-{dead}-abcd1235")
    (made / "inside").symlink_to(precious)
    assert fates(places) == {made.name: "removed"}
    assert (precious / "file").read_text() == "x"


def test_another_users_is_not_even_spoken_of(places, dead):
    directory(places, f"kvbaton-{dead}-abcd1234")
    other = Places(places.folders, places.shared_memory, user=os.geteuid() + 1)
    assert clean(other, dry_run=False) == []
    assert len(clean(places, dry_run=True)) == 1


def test_what_does_not_say_whose_it_is_is_kept(places):
    directory(places, "kvbaton-kill-abc")
    directory(places, "something-else")
    assert fates(places) == {"kvbaton-kill-abc": "kept"}
    assert "does not say whose it is" in reason(places, "kvbaton-kill-abc")


def test_a_folder_that_hands_its_group_on_is_cleaned_too(places):
    places.folders[0].chmod(0o2700)
    (left := private_directory.make(places.folders[0])).path.stat()
    os.close(left.lock)
    proc = fake_proc(places, os.getpid(), left.path.stat().st_mtime - 5, state="Z")
    assert fates(Places(places.folders, places.shared_memory, proc=proc)) == {left.path.name: "removed"}


def test_what_only_happens_to_have_such_a_name_is_kept(places, dead):
    ours = directory(places, f"kvbaton-{dead}-abcd1234")
    ours.chmod(0o755)
    names = (f"kvbaton-{dead}-results", "kvbaton-20260412-abcd1234", f"kvbaton-{dead}-Results1")
    somebodys = [directory(places, name) for name in names]
    (file := places.folders[0] / f"kvbaton-{dead}-notes123").write_text("x")
    assert set(fates(places).values()) == {"kept"}
    private_directory._sweep(places.folders[0])
    assert all(path.exists() for path in (ours, *somebodys, file))


def test_a_container_does_not_judge_shared_memory_that_others_may_have_open(places, dead):
    shared = places.shared_memory / f"kvbaton-mine-{dead}-abc"
    shared.touch()
    made = directory(places, f"kvbaton-{dead}-abcd1234")
    proc = fake_proc(places, 1, 2_000_000_000)
    (proc / "self/ns").mkdir(parents=True)
    (proc / "self/ns/pid").symlink_to("pid:[4026532201]")
    inside = Places(places.folders, places.shared_memory, proc=proc)
    assert fates(inside) == {shared.name: "kept", made.name: "removed"}
    assert "from the host" in reason(inside, shared.name)
    (proc / "self/ns/pid").unlink()
    (proc / "self/ns/pid").symlink_to("pid:[4026531836]")
    assert fates(inside) == {shared.name: "removed"}


def test_what_is_no_file_is_kept(places, dead):
    os.mkfifo(places.shared_memory / f"kvbaton-mine-{dead}-abc")
    assert set(fates(places).values()) == {"kept"}


def test_what_is_replaced_while_it_is_looked_at_is_not_removed(places, dead, monkeypatch):
    made = directory(places, f"kvbaton-{dead}-abcd1234")
    removed = leftovers._removed

    def late(path, looked_at):
        path.rename(path.with_name("moved"))
        path.mkdir()
        return removed(path, looked_at)

    monkeypatch.setattr(leftovers, "_removed", late)
    assert fates(places) == {made.name: "failed"}
    assert made.exists()


def test_a_plugins_own_is_kept_for_as_long_as_a_lock_is_held(places, tmp_path):
    half, lock = tmp_path / ".converting-abc", tmp_path / "model.lock"
    half.mkdir()
    lock.touch()
    told = Places(
        shared_memory=tmp_path / "shm",
        plugins=lambda: [Leftover(half, "half converted model", locks=(lock, tmp_path / "none.lock"))],
    )
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert fates(told) == {half.name: "kept"}
    assert fates(told) == {half.name: "removed"}
    bare = tmp_path / "bare"
    bare.mkdir()
    told = Places(shared_memory=tmp_path / "shm", plugins=lambda: [Leftover(bare, "no proof")])
    assert fates(told) == {"bare": "kept"}


def test_a_directory_that_was_just_made_is_kept_and_one_whose_maker_was_killed_is_not(places):
    """As the code makes them."""
    (base := places.folders[0]).chmod(0o700)
    program = (
        "import sys; from pathlib import Path; from kvbaton.control import private_directory\n"
        "print(private_directory.make(Path(sys.argv[1])).path, flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(base)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        theirs = Path(process.stdout.readline().strip())
        ours = private_directory.make(base)
        assert fates(places) == {theirs.name: "kept", ours.path.name: "kept"}
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert fates(places) == {theirs.name: "removed", ours.path.name: "kept"}
    ours.remove()


@pytest.mark.parametrize("moment", ["made", "opened", "being removed"])
def test_one_that_another_container_cleans_as_it_is_made_is_made_again(places, monkeypatch, moment):
    """It cannot know whose number the name has, and no lock is held yet."""
    mkdtemp, flock, taken = tempfile.mkdtemp, fcntl.flock, []

    def made(**how):
        path = mkdtemp(**how)
        if not taken and moment == "made":
            taken.append(path)
            Path(path).rmdir()
        return path

    def locked(descriptor, how):
        if not taken:
            taken.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
            Path(taken[0]).rmdir()
            if moment == "being removed":
                raise BlockingIOError
        flock(descriptor, how)

    monkeypatch.setattr(tempfile, "mkdtemp", made)
    monkeypatch.setattr(fcntl, "flock", locked)
    ours = private_directory.locked(places.folders[0])
    assert ours.path.is_dir()
    assert str(ours.path) not in taken
    ours.remove()


def test_keys_that_are_being_made_are_kept(places, tmp_path, monkeypatch):
    """Those of a killed process are as any directory of that kind."""
    keys = tmp_path / "keys"
    keys.mkdir()
    making = Places(shared_memory=places.shared_memory, keys=(keys,))
    create, seen = curve.zmq.auth.create_certificates, []

    def create_and_look(folder, name):
        seen.append((folder.name, fates(making)))
        return create(folder, name)

    monkeypatch.setattr(curve.zmq.auth, "create_certificates", create_and_look)
    curve.make_keys(keys, ["decode-0"])
    assert seen
    assert all(found == {name: "kept"} for name, found in seen)
    assert fates(making) == {}


def test_a_kits_run_has_a_folder_that_is_known_for_its_own(places, monkeypatch):
    made = []
    monkeypatch.setattr(conformance, "_look", lambda order: None)
    monkeypatch.setattr(tempfile, "tempdir", str(places.folders[0]))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(conformance, "command", lambda order, report, lifeline: [sys.executable, "-c", ""])
    monkeypatch.setattr(conformance, "_wait", lambda process, _: (made.append(fates(places)), process.wait())[1])
    conformance.judge(conformance.Order("x"))
    ((name, fate),) = made[0].items()
    assert name.startswith(f"kvbaton-{os.getpid()}-")
    assert fate == "kept"
    assert fates(places) == {}
