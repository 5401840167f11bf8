"""Tiny stages for the tests of launchers and channels.  Each stands for one way in which a stage behaves."""

import ctypes
import os
import subprocess
import sys
import threading
from pathlib import Path

from kvbaton.messages import Fatal, Reply, Stop


def echo(spec, channel, lifeline):
    """Sends back what it receives; ends on Stop, or with status 7 when the coordinator is gone."""
    while channel.lost is None:
        for message in channel.receive():
            if isinstance(message, Stop):
                return 0
            channel.send(message)
        channel.wait(10.0)
    _note(spec, f"lost: {channel.lost}")
    return 7


def echo_then_linger(spec, channel, lifeline):
    """Like echo; when the coordinator is gone it still prints a lot, as a draining stage may."""
    echo(spec, channel, lifeline)
    for _ in range(1000):
        print("draining" * 100)
        print("draining" * 100, file=sys.stderr)
    _note(spec, "drained")
    return 0


def crash(spec, channel, lifeline):
    print("about to divide")
    return 1 // 0


def leave(spec, channel, lifeline):
    """Speaks last words on every way out, then ends with the status it was told."""
    channel.send(Fatal("leaving"))
    print("printed", end="")
    sys.stdout.flush()
    print("\nwarned", file=sys.stderr)
    os.write(2, b"raw, without an end")
    return int(spec.settings["status"])


def hang(spec, channel, lifeline):
    """Says that it is there and then looks at nothing any more."""
    channel.send(Fatal(str(os.getpid())))
    threading.Event().wait()


def hang_in_native_code(spec, channel, lifeline):
    """Ends in a call that keeps every other thread of Python from running."""
    channel.send(Fatal("there"))
    lifeline.wait(60.0)
    ctypes.PyDLL(None).sleep(600)


def hang_with_child(spec, channel, lifeline):
    """Leaves a process of its own behind, in its group and with its output open."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    channel.send(Fatal(str(child.pid)))
    threading.Event().wait()


def describe(spec, channel, lifeline):
    """Tells about the process it runs in."""
    facts = {
        "settings": dict(spec.settings),
        "role": spec.role,
        "session": os.getsid(0),
        "pid": os.getpid(),
        "device": os.environ.get("STAGE_DEVICE"),
        "stdin": os.read(0, 1).decode(),
        "fds": sorted(str(link.readlink()) for link in list(Path("/proc/self/fd").iterdir()) if link.is_symlink()),
    }
    channel.send(Reply("facts", "test", facts))
    return 0


def mute(spec, channel, lifeline):
    """Gives its channel up, and ends only once the file that its settings name is there."""
    channel.close()
    while not (Path(spec.settings["until"]).exists() or lifeline.wait(0.01)):
        pass
    return 0


def flood(spec, channel, lifeline):
    """Prints without end."""
    channel.send(Fatal("flooding"))
    line = "x" * 99
    while channel.lost is None:
        print(line)


def obedient(spec, channel, lifeline):
    """Ends when its lifeline is cut, whatever the channel says."""
    channel.send(Fatal("there"))
    while not lifeline.wait(10.0):
        pass
    return 5


def _note(spec, text):
    if "note" in spec.settings:
        path = Path(spec.settings["note"])
        partial = path.with_suffix(".partial")
        partial.write_text(text)
        partial.rename(path)
