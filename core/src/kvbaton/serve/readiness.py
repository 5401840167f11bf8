"""Whether requests can be served, and if not, why: what ``/health`` says.  An ordinary observer."""

from __future__ import annotations

from collections.abc import Sequence

from kvbaton.hooks import hookimpl
from kvbaton.identity import PeerId


class Readiness:
    """Written by the coordinator's thread and the main one, read by the event loop: single assignments only."""

    def __init__(self) -> None:
        self._not_yet: str | None = "starting"
        self._no_more: str | None = None
        self._stages: tuple[str, ...] = ()
        self._up: dict[str, PeerId] = {}
        self._lost: dict[str, str] = {}

    def progress(self, text: str) -> None:
        """What start-up is at."""
        if self._not_yet is not None:
            self._not_yet = f"starting: {text}"

    def ready(self, stages: Sequence[str]) -> None:
        """All of ``stages`` are connected."""
        self._stages = tuple(stages)
        self._not_yet = None

    def end(self, reason: str) -> None:
        """No request is taken any more."""
        if self._no_more is None:
            self._no_more = reason

    @hookimpl
    def kvbaton_peer_up(self, peer: PeerId) -> None:
        self._up[peer.name] = peer
        self._lost.pop(peer.name, None)

    @hookimpl
    def kvbaton_peer_lost(self, peer: PeerId, cause: str) -> None:
        if self._up.get(peer.name) == peer:
            self._lost[peer.name] = cause
            del self._up[peer.name]

    @property
    def closed(self) -> str | None:
        """Why requests are refused at once, as a runtime would: it is not there yet, or no more."""
        return self._no_more or self._not_yet

    @property
    def reason(self) -> str | None:
        """Why nobody should send requests here now; None where they are served."""
        return self.reason_beside("")

    def reason_beside(self, said: str) -> str | None:
        """The same for whoever is told ``said`` as well: a cause that stands there is not told twice."""
        if self.closed is not None:
            return self.closed
        up = set(self._up)
        for role in dict.fromkeys(_role(name) for name in self._stages):
            if not any(_role(name) == role for name in up):
                lost = [(name, cause.rstrip(".")) for name, cause in tuple(self._lost.items()) if _role(name) == role]
                causes = "".join(f"; {name}: {cause}" for name, cause in lost if cause not in said)
                return f"no {role} stage is up{causes}"
        return None

    @property
    def stages(self) -> dict[str, str]:
        """Each stage, ``up`` or ``down``."""
        up = set(self._up)
        return {name: "up" if name in up else "down" for name in self._stages}


def _role(name: str) -> str:
    return name.rpartition("-")[0]
