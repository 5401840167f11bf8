"""How long the pump pauses, and for whom (the connector is polled on each of its passes)."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from kvbaton.stage.pump import PARKED_SECONDS, Pump

MIN, MAX = 0.00005, 0.0005


class Script:
    """What each pass finds, in turn: ``flowing``, ``told`` (it did something else), ``urgent``, ``distant``
    (urgent, and not to be expected soon), ``live`` (of use to a peer only) or ``parked``."""

    def __init__(self, passes: Iterable[str]) -> None:
        self._passes = iter(passes)
        self._now = "flowing"
        self.pauses: list[float] = []
        self.ended = False

    def advance(self) -> bool:
        found = next(self._passes, None)
        self.ended, self._now = found is None, found or "flowing"
        return self._now in ("flowing", "told")

    @property
    def flowing(self) -> bool:
        return self._now == "flowing"

    @property
    def live(self) -> bool:
        return self._now in ("urgent", "distant", "told", "live")

    @property
    def urgent(self) -> bool:
        return self._now in ("urgent", "distant", "told")

    @property
    def imminent(self) -> bool:
        return self._now != "distant"

    def wait(self, timeout: float) -> None:
        self.pauses.append(timeout)


def pauses(*passes: str) -> list[float]:
    script = Script(passes)
    escaped: list[BaseException] = []
    pump = Pump(script, name="pump", idle_min=MIN, idle_max=MAX, failed=escaped.append)
    pump.start()
    assert pump.join(10)
    assert not escaped
    return [round(pause, 6) for pause in script.pauses]


def test_pauses_double_up_to_the_longest_and_begin_anew_after_work() -> None:
    grown = [0.00005, 0.0001, 0.0002, 0.0004, 0.0005, 0.0005]
    assert pauses(*["urgent"] * 6) == grown
    assert pauses(*["urgent"] * 6, "flowing", *["urgent"] * 6) == grown * 2
    assert pauses("flowing", "flowing") == []


def test_after_words_the_pump_makes_room_for_whoever_was_told() -> None:
    assert pauses("told", "told") == [MIN, MIN]
    assert pauses(*["urgent"] * 6, "told", "urgent", "urgent")[-3:] == [MIN, 2 * MIN, 4 * MIN]


def test_what_cannot_come_soon_is_polled_for_at_the_longest_pause_from_the_first() -> None:
    assert pauses("told", *["distant"] * 3) == [MIN, MAX, MAX, MAX]
    # and for what may come at any moment the pauses are short again, once there was something
    assert pauses("distant", "told", "urgent") == [MAX, MIN, 2 * MIN]


def test_where_only_a_peer_wants_polling_pauses_grow_longer() -> None:
    grown = pauses(*["live"] * 12)
    assert grown[:5] == [0.00005, 0.0001, 0.0002, 0.0004, 0.0008]
    assert grown[-1] == grown[-2] == 0.005
    # the moment that somebody waits here they are short again
    assert pauses(*["live"] * 12, "urgent")[-1] == MAX


@pytest.mark.parametrize("before", ["urgent", "live"])
def test_with_nothing_live_the_pump_is_parked(before: str) -> None:
    assert pauses(*[before] * 8, "parked", "parked", before)[-3:] == [PARKED_SECONDS, PARKED_SECONDS, MIN]
