"""CURVE keys: who may speak on a control channel between hosts, and as whom.

Every participant has a key pair: the coordinator under the name ``coordinator``, each stage under its own.  A folder
holds them as ZeroMQ certificates: ``NAME.key`` is public, ``NAME.key_secret`` is for the one host where NAME runs, and
for its owner's eyes alone.  A stage proves that the coordinator is the one whose public key it has, the coordinator
that a stage holds the secret key of the name it claims; nobody else gets past the handshake, and all is encrypted.

Import this module where it is needed: it imports pyzmq.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import zmq
import zmq.auth

from kvbaton.control import private_directory
from kvbaton.errors import ConfigurationError

#: The name under which the coordinator's keys are kept.
COORDINATOR: Final = "coordinator"

_PUBLIC, _SECRET = ".key", ".key_secret"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DOMAIN: Final = b"kvbaton"


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A CURVE key pair, each half 40 characters of Z85.  The secret half is never shown."""

    public: bytes
    secret: bytes = field(repr=False)


def make_keys(folder: Path, names: Sequence[str]) -> list[Path]:
    """A fresh pair for each of ``names`` in ``folder``; the files' paths.  The folder is made (0700) if it is not
    there, in one that is.

    No file that exists is overwritten: a pair in use would be lost.  Secret files have mode 0600 from the start.
    Raises: ConfigurationError with the reason; pairs before the one that failed were made.
    """
    _require_curve()
    made: list[Path] = []
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        for name in names:
            if not _NAME.fullmatch(name):
                raise ConfigurationError(
                    f'"{name}" cannot be the name of a key: write "{COORDINATOR}" or a stage\'s name such as prefill-0'
                )
            targets = [folder / f"{name}{suffix}" for suffix in (_PUBLIC, _SECRET)]
            for target in targets:
                if target.exists():
                    raise ConfigurationError(
                        f"{target} exists already and was left as it is; remove {name}{_PUBLIC} and {name}{_SECRET}"
                        " first if the pair shall be replaced on every host",
                        path=str(target),
                    )
            # made where nobody else can look, so that the secret was never readable under any file mask
            private = private_directory.locked(folder, ".")
            try:
                sources = map(Path, zmq.auth.create_certificates(private.path, name))
                for source, target, mode in zip(sources, targets, (0o644, 0o600), strict=True):
                    source.chmod(mode)
                    made.append(source.rename(target))
            finally:
                private.remove()
    except OSError as error:
        why = str(error) if folder.is_dir() else private_directory.why_not_made(folder, error)
        raise ConfigurationError(f"keys cannot be made in {folder}: {why}", path=str(folder)) from error
    return made


def load_pair(folder: Path, name: str) -> KeyPair:
    """The key pair of ``name``.

    Raises: ConfigurationError if the secret file is missing, malformed, not this user's, or open to others.
    """
    _require_curve()
    path = folder / f"{name}{_SECRET}"
    try:
        found = path.stat()
    except OSError as error:
        raise ConfigurationError(
            f"the secret key {path} cannot be looked at: {error.strerror}. Make a pair with: kvbaton keys {folder}"
            f" {name}; its {name}{_PUBLIC} goes to the other side.",
            path=str(path),
        ) from error
    if found.st_uid not in (os.geteuid(), 0):
        raise ConfigurationError(
            f"the secret key {path} belongs to user {found.st_uid}, not to user {os.geteuid()}; nothing was opened",
            path=str(path),
        )
    if found.st_mode & 0o077:
        raise ConfigurationError(
            f"the secret key {path} has mode {stat.S_IMODE(found.st_mode):04o}, so that others can use it: chmod 600"
            f" {path}; if anybody had access, make a new pair. Nothing was opened.",
            path=str(path),
        )
    public, secret = _load(path)
    if secret is None:
        raise ConfigurationError(f"{path} holds no secret key; make a new pair with kvbaton keys", path=str(path))
    return KeyPair(public, secret)


def load_public(folder: Path, name: str) -> bytes:
    """The public key of ``name``.  Raises: ConfigurationError if its file is missing or malformed."""
    return _load(folder / f"{name}{_PUBLIC}")[0]


def load_allowed(folder: Path, names: Sequence[str]) -> Mapping[bytes, str]:
    """Public key to name, of all ``names``.

    Raises: ConfigurationError if a file is missing or malformed, or two names have one key: then either could be the
    other.
    """
    allowed: dict[bytes, str] = {}
    for name in names:
        key = load_public(folder, name)
        if key in allowed:
            raise ConfigurationError(
                f"{folder}: {allowed[key]} and {name} have the same public key; every stage needs a pair of its own",
                path=str(folder),
            )
        allowed[key] = name
    return allowed


@dataclass(frozen=True, slots=True)
class ServerKeys:
    """What the coordinator needs: its own pair, and whose keys it lets in under which names."""

    own: KeyPair
    allowed: Mapping[bytes, str]


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """What a stage needs: its own pair, and the public key of the coordinator that it means."""

    own: KeyPair
    server: bytes

    def apply(self, socket: zmq.Socket[bytes]) -> None:
        """Make ``socket``, not yet connected, speak CURVE."""
        socket.curve_publickey, socket.curve_secretkey = self.own.public, self.own.secret
        socket.curve_serverkey = self.server


class Gate:
    """Answers ZeroMQ's question whether a key may come in (RFC 27), on the thread that owns the socket.

    ZeroMQ asks over a socket in the same context; nobody gets in while nobody answers.  The name behind an accepted
    key is the ``User-Id`` of every frame of that connection: it is told by the key, whatever the peer says.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: ServerKeys) -> None:
        self._allowed = keys.allowed
        self.refused = 0
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind("inproc://zeromq.zap.01")

    @staticmethod
    def guard(socket: zmq.Socket[bytes], keys: ServerKeys) -> None:
        """Make ``socket``, not yet bound, a CURVE server whose connections a gate must accept."""
        socket.curve_server = True
        socket.curve_secretkey = keys.own.secret
        socket.zap_domain = _DOMAIN
        socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without a gate nobody comes in

    def answer(self) -> None:
        """Answer what was asked since.  Never waits."""
        while int(self.socket.get(zmq.EVENTS)) & zmq.POLLIN:
            frames = self.socket.recv_multipart(zmq.NOBLOCK)
            self.socket.send_multipart(self._verdict(frames), zmq.NOBLOCK)

    def close(self) -> None:
        """Give the socket back: from now on nobody comes in."""
        self.socket.close(linger=0)

    def _verdict(self, frames: Sequence[bytes]) -> list[bytes]:
        # version, request, domain, address, identity, mechanism, credentials...
        request = frames[1] if len(frames) > 1 else b""
        name = None
        if len(frames) == 7 and frames[0] == b"1.0" and frames[2] == _DOMAIN and frames[5] == b"CURVE":
            name = self._allowed.get(zmq.utils.z85.encode(frames[6]))
        if name is None:
            self.refused += 1
            return [b"1.0", request, b"400", b"this key is not known here", b"", b""]
        return [b"1.0", request, b"200", b"OK", name.encode(), b""]


def user_of(frame: Any) -> str:
    """The name behind the key of the connection that ``frame`` came over; empty where there was no key."""
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:
        return ""


def _load(path: Path) -> tuple[bytes, bytes | None]:
    try:
        public, secret = zmq.auth.load_certificate(path)
        for key in (public, secret):
            if key is not None and len(zmq.utils.z85.decode(key)) != 32:
                raise ValueError("a key is 40 characters long")
    except (OSError, ValueError, KeyError, UnicodeDecodeError) as error:
        missing = not path.exists()
        why = "is not there" if missing else f"is no CURVE key file: {error}"
        raise ConfigurationError(
            f"the key file {path} {why}. kvbaton keys makes pairs; copy the public half ({_PUBLIC}) of each"
            " participant to whom it speaks to.",
            path=str(path),
        ) from error
    return public, secret


def _require_curve() -> None:
    if not zmq.has("curve"):
        raise ConfigurationError(
            "this pyzmq was built without CURVE, which control over TCP needs: install a wheel of pyzmq, or build"
            " libzmq with libsodium"
        )
