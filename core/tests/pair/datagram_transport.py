"""A transport between processes for tests, over datagrams of a Unix socket; ``fault`` breaks it in one way.

``reached``: a file that is made once a chunk is submitted.  Not fast: a chunk is so many datagrams, which its target
writes where they belong, and one that says that all came.
"""

import itertools
import os
import signal
import socket
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import msgspec
from pydantic import BaseModel, ConfigDict

from kvbaton.connector import (
    API_VERSION,
    IDLE,
    Availability,
    Capabilities,
    Completion,
    ConnectorBase,
    Outcome,
    PeerEvent,
    Progress,
    Receipt,
)

PIECE = 16 << 10
CAPABILITIES = Capabilities(cross_process=True)
_numbers = itertools.count()


class Options(BaseModel):
    model_config = ConfigDict(extra="forbid")
    fault: str = ""
    reached: str = ""


class Word(msgspec.Struct, array_like=True):
    what: str  # hello, bytes, got, bye
    sender: str
    transfer: str = ""
    sequence: int = 0
    region: int = 0
    offset: int = 0
    last: bool = False
    data: bytes = b""


@dataclass
class Under:
    chunk: object
    words: deque


class Connector(ConnectorBase):
    capabilities = CAPABILITIES

    def __init__(self, peer, fault, reached=""):
        self.me, self.fault, self.reached = peer, fault, reached
        if fault == "half":
            self.capabilities = Capabilities(cross_process=True, max_segments=0.5)
        self.address = f"\0kvbaton-test-{os.getpid()}-{next(_numbers)}"
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(self.address)
        self.socket.setblocking(False)
        self.peers, self.up, self.sent, self.words = {}, set(), {}, deque()

    def register(self, regions):
        self.views = {region.id: region.view() for region in regions}

    def metadata(self):
        return self.address.encode()

    def connect(self, peer):
        if self.fault == "refuse":
            raise RuntimeError("no route to there")
        self.peers[peer.peer.name] = (peer.peer, peer.metadata.decode())
        self.say(peer.peer.name, Word("hello", self.me.name))

    def say(self, name, *words):
        self.words.extend((name, word) for word in words)

    def disconnect(self, peer):
        self.say(peer.name, Word("bye", self.me.name))

    def submit(self, chunk):
        if self.fault in ("hang", "die"):
            print("and so on\n" * 10_000, flush=True)
            print("the last straw", flush=True)
        if self.reached:
            Path(self.reached).touch()
        if self.fault == "hang" and self.me.name.startswith("prefill"):
            signal.pause()
        if self.fault == "raise":
            raise RuntimeError("no more descriptors")
        if self.fault == "surrogate":
            raise RuntimeError("no file \udcff")
        if self.fault == "die" and chunk.nbytes > 1 << 16:
            os.kill(os.getpid(), signal.SIGKILL)
        words = []
        rows = zip(chunk.source.triples(), chunk.target.triples(), strict=True)
        for (source, start, length), (region, at, _) in rows:
            for done in range(0, length, PIECE):
                data = self.views[source][start + done : start + min(done + PIECE, length)].tobytes()
                words.append(
                    Word("bytes", self.me.name, chunk.transfer, chunk.sequence, region, at + done, False, data)
                )
        if self.fault == "corrupt" and words:
            words[-1].data = words[-1].data[:-1] + bytes([words[-1].data[-1] ^ 1])
        if self.fault == "outside" and words:
            words[-1].data += b"x"
        if self.fault == "lose":
            words = []
        words.append(Word("bytes", self.me.name, chunk.transfer, chunk.sequence, last=True))
        self.sent[chunk.transfer, chunk.sequence] = chunk
        self.say(chunk.peer.name, *words)
        return True

    def poll(self):
        completions, receipts, peers = [], [], []
        deaf = self.fault == "target dies unheard" and self.me.name.startswith("prefill")
        if self.fault.startswith("target dies") and self.me.name.startswith("decode") and self.up:
            os._exit(3)
        while self.words:
            name, word = self.words[0]
            try:
                self.socket.sendto(msgspec.msgpack.encode(word), self.peers[name][1])
            except BlockingIOError:
                break
            except OSError:
                if word.what != "bye":
                    raise
            self.words.popleft()
            if word.what == "bye":
                peers.append(PeerEvent(self.peers[name][0], False, True))
            if self.fault == "slow" and word.what == "bytes":
                time.sleep(0.005)  # 1 MiB: a third of a second, which is more than a measurement repeats
        for _ in range(0 if deaf else 64):
            try:
                word = msgspec.msgpack.decode(self.socket.recv(1 << 17), type=Word)
            except BlockingIOError:
                break
            peer = self.peers.get(word.sender, (None,))[0]
            if word.what == "hello":
                if peer is None:  # heard before we were told of it: it is told again
                    continue
                if word.sender not in self.up:
                    self.up.add(word.sender)
                    self.say(word.sender, Word("hello", self.me.name))
                    peers.append(PeerEvent(peer, True))
            elif word.what == "bytes" and not word.last:
                self.views[word.region][word.offset : word.offset + len(word.data)] = memoryview(word.data)
            elif word.what == "bytes":
                if self.fault != "no receipt":
                    receipts.append(Receipt(peer, word.transfer, word.sequence))
                self.say(word.sender, Word("got", self.me.name, word.transfer, word.sequence))
            elif word.what == "got":
                del self.sent[word.transfer, word.sequence]
                completions.append(Completion(word.transfer, word.sequence, Outcome.DONE, True, True))
        for name in self.peers:
            if name not in self.up and not self.words:
                self.say(name, Word("hello", self.me.name))
        if not (completions or receipts or peers):
            return IDLE
        return Progress(tuple(completions), tuple(receipts), tuple(peers))

    def outstanding(self):
        return len(self.sent)

    def close(self):
        if self.fault == "close":
            raise RuntimeError("still busy")
        self.socket.close()


class Plugin:
    name = "datagrams"
    api_version = API_VERSION
    Options = Options

    def probe(self, need):
        return Availability(need.memory_kind == "host", "no device memory", "use host memory", CAPABILITIES)

    def open(self, options, context):
        if options.fault == "open":
            raise RuntimeError("the library is not what it was")
        return Connector(context.peer, options.fault, options.reached)


plugin = Plugin()
