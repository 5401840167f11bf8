"""What tests let an end do in another process; functions of a module, so that they can be named to it."""

import time

import numpy as np

from kvbaton.connector import MemoryRegion


def give_memory(end, nbytes, value):
    """One region of equal bytes, registered: much of it, in little time."""
    region = MemoryRegion.of_array(0, np.full(nbytes, value, np.uint8))
    end.memory._regions[0] = region
    end.guard.register([region])


def only(end, value):
    """Whether a region has no other byte."""
    return bool((end.memory.regions[0].view() == value).all())


def submit_all(end, chunks):
    """Submit chunks; whether each was taken."""
    return [end.guard.submit(chunk) for chunk in chunks]


def pump_for(end, seconds):
    """Poll for a while, whatever comes; what was heard stays with the end."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        end.pump()
        end.guard.wait(0.0005)
    return len(end.completions), len(end.receipts)


_strangers = []


def arrive(_end, metadata, words):
    """As a process that was given an endpoint: say ``words`` to its lobby, from an agent of our own."""
    from kvbaton_nixl import library
    from kvbaton_nixl.options import NixlOptions
    from kvbaton_nixl.words import Lobby

    agent = library.make_agent(f"stranger-{time.monotonic_ns()}", NixlOptions())
    name = agent.add_remote_agent(Lobby.decode(metadata).agent)
    for word in words:
        agent.send_notif(name, word)
    _strangers.append(agent)


def linger(_end):
    """What was said and is queued goes out."""
    for agent in _strangers:
        agent.get_new_notifs()


def leave(_end):
    """The agents end."""
    from kvbaton_nixl.link import destroy

    while _strangers:
        destroy(_strangers.pop())
