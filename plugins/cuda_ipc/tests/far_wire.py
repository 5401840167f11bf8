"""A wire in a process of its own: says who it is, is told of a peer, and behaves as its argument says."""

import os
import sys
import time

import numpy as np

from kvbaton.identity import PeerId
from kvbaton_cuda_ipc.wire import Settings, Up, Wire, Word


def main():
    wire = Wire(PeerId.start("far"), "test/1", Settings({"NET_DEVICES": "lo"}))
    print(wire.me.name, wire.me.epoch, wire.card.hex(), flush=True)
    name, epoch, card = sys.stdin.readline().split()
    peer = PeerId(name, int(epoch))
    wire.connect(peer, bytes.fromhex(card), b"far")
    parent = os.getppid()
    payload = np.ones(64 << 20, np.uint8) if sys.argv[1] == "payload" else None
    due = []
    while os.getppid() == parent:
        wire.wait(0.05)
        for event in wire.poll():
            match event:
                case Word(data=b"later"):
                    due.append(time.monotonic() + 0.2)
                case Word(data=b"go"):
                    wire.send_bulk(peer, payload)
                case Word(data=data):
                    wire.send(peer, data)
                case Up():
                    pass
        while due and due[0] <= time.monotonic():
            due.pop(0)
            wire.send(peer, b"later")


main()
