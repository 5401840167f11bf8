"""How a stage of another host gets its ticket: it asks the coordinator, with a key that proves its name.

Import this module where it is needed: it imports pyzmq.
"""

from __future__ import annotations

import socket as sockets
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Final

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from kvbaton.control.curve import ClientKeys
from kvbaton.control.zmq import JOIN, JoinReply, JoinRequest, Ticket
from kvbaton.errors import ConfigurationError, ConnectError

#: Seconds between two attempts to connect, and between two looks at whether to go on.
_RETRY: Final = 0.25

#: A handshake that ends early may have met a coordinator that was just leaving; so many in a row did not.
_BROKEN_HANDSHAKES: Final = 3

_LARGEST_REPLY: Final = 1 << 16


def join(
    address: str,
    name: str,
    keys: ClientKeys,
    *,
    within: float,
    waiting: Callable[[str], None] = lambda text: None,
    stop: Callable[[], bool] = lambda: False,
) -> Ticket:
    """The ticket of stage ``name`` from the coordinator at ``address`` (``tcp://HOST:PORT``).

    The coordinator may not be there yet: ``waiting`` is told once, in words, and ``within`` seconds are waited.
    ``stop`` is asked now and then and ends the attempt.

    Raises: ConfigurationError where waiting would not help (a host that nobody knows, keys that do not match, a name
    that is not expected), ConnectError where nobody has answered in time or ``stop`` said so.
    """
    _resolve(address)
    with ExitStack() as undo:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        undo.callback(context.destroy, linger=0)
        dealer = context.socket(zmq.DEALER)
        dealer.linger = 0
        dealer.immediate = True
        dealer.ipv6 = "[" in address
        dealer.reconnect_ivl = int(_RETRY * 1000)
        dealer.maxmsgsize = _LARGEST_REPLY
        keys.apply(dealer)
        monitor = dealer.get_monitor_socket()
        undo.callback(dealer.disable_monitor)
        dealer.connect(address)
        reply = _Attempt(address, name, dealer, monitor, within, waiting, stop).run()
    if reply.ticket is None:
        raise ConfigurationError(
            f"the coordinator at {address} refused {name}: {reply.refusal or 'no reason given'}.", address=address
        )
    if reply.ticket.peer.name != name:
        raise ConfigurationError(f"the coordinator at {address} answered {name} with a ticket of {reply.ticket.peer}")
    # the coordinator knows itself by the address that it listens at, which need not lead there from here
    return msgspec.structs.replace(reply.ticket, address=address)


class _Attempt:
    """One stage's attempt to join, until it is answered or its time is over."""

    def __init__(
        self, address: str, name: str, dealer: zmq.Socket[bytes], monitor: zmq.Socket[bytes], within: float,
        waiting: Callable[[str], None], stop: Callable[[], bool],
    ) -> None:  # fmt: skip
        self._address = address
        self._name = name
        self._dealer = dealer
        self._monitor = monitor
        self._within = within
        self._waiting = waiting
        self._stop = stop
        self._up = False
        self._broken = 0
        self._told = False

    def run(self) -> JoinReply:
        deadline = time.monotonic() + self._within
        poller = zmq.Poller()
        poller.register(self._dealer, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        while True:
            left = deadline - time.monotonic()
            if self._stop():
                raise ConnectError(f"{self._name} was told to end before it had joined", address=self._address)
            if left <= 0:
                raise ConnectError(f"C6.7: {self._late()}", address=self._address)
            ready = dict(poller.poll(int(1000 * min(left, _RETRY)) + 1))
            if self._monitor in ready:
                self._on_event(recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"])
            if self._dealer in ready:
                try:
                    return msgspec.json.decode(self._dealer.recv(zmq.NOBLOCK), type=JoinReply)
                except msgspec.MsgspecError as error:
                    raise ConfigurationError(
                        f"what listens at {self._address} is no coordinator of this release: {error}",
                        address=self._address,
                    ) from error

    def _on_event(self, event: int) -> None:
        match event:
            case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._up, self._broken = True, 0
                self._dealer.send(JOIN + msgspec.json.encode(JoinRequest(name=self._name)), zmq.NOBLOCK)
            case zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                raise ConfigurationError(
                    f"the coordinator at {self._address} does not know the key of {self._name}: copy {self._name}.key"
                    " into the coordinator's control.keys and start it anew, or use the pair that belongs to it",
                    address=self._address,
                )
            case zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                raise self._stranger()
            case zmq.EVENT_DISCONNECTED if not self._up:
                self._broken += 1
                if self._broken >= _BROKEN_HANDSHAKES:
                    raise self._stranger()
            case zmq.EVENT_DISCONNECTED:
                self._up = False  # it left before it had answered: another one may come
            case zmq.EVENT_CONNECT_RETRIED if not self._told:
                self._told = True
                self._waiting(
                    f"no coordinator answers at {self._address} yet; waiting up to {self._within:g} s for it"
                    " (deadline.startup)"
                )
            case _:
                pass

    def _stranger(self) -> ConfigurationError:
        return ConfigurationError(
            f"what listens at {self._address} ended the handshake: it is no coordinator, or its key is not the one in"
            " coordinator.key here. Copy coordinator.key from the coordinator's host.",
            address=self._address,
        )

    def _late(self) -> str:
        if self._up:
            return f"the coordinator at {self._address} has not answered {self._name} within {self._within:g} s"
        return (
            f"no coordinator could be reached at {self._address} within {self._within:g} s (deadline.startup): is it"
            " running, does control.connect name its host and port, and does a firewall let this host through?"
        )


def _resolve(address: str) -> None:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    try:
        sockets.getaddrinfo(host.strip("[]"), port, type=sockets.SOCK_STREAM)
    except OSError as error:
        raise ConfigurationError(
            f"control.connect = {address}: the host {host} is not known here: {error.strerror}", address=address
        ) from error
