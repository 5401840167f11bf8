"""What a test lets an end of a pair do."""

import os
import threading


def regions(end, factor):
    return [factor * region.length for region in end.memory.regions]


def divide(end, by):
    return 1 / by


def tell(end, word):
    end.bell.sendall(bytes([word]))
    return "told"


def listen(end):
    return end.bell.recv(1)[0]


def dies_later(end):
    """When its answer was seen."""
    threading.Timer(0.3, os._exit, [3]).start()


def waits(end):
    threading.Event().wait(600.0)
