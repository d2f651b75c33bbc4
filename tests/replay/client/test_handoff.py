"""Handoff: bounded, in order, and nobody waits at it after it was closed."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from patience import PATIENCE_S

from dase_grpc.errors import Halted
from dase_grpc.replay.client.handoff import Handoff


class Waiter:
    """A blocking call on a thread of its own."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self.result: Any = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.result = self._call()
        except Halted as halted:
            self.result = halted

    @property
    def blocked(self) -> bool:
        """Whether the call has not come back although it had time to."""
        self._thread.join(0.05)
        return self._thread.is_alive()

    def outcome(self) -> Any:
        """What the call gave or raised; it must come back soon."""
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        return self.result


def test_items_come_out_in_order():
    handoff = Handoff(10)
    for item in range(5):
        handoff.put(item)
    assert len(handoff) == 5
    assert [handoff.get() for _ in range(5)] == [0, 1, 2, 3, 4]
    assert len(handoff) == 0


def test_get_waits_for_an_item():
    handoff = Handoff(1)
    getting = Waiter(handoff.get)
    assert getting.blocked
    handoff.put("item")
    assert getting.outcome() == "item"


def test_put_waits_for_room():
    handoff = Handoff(2)
    handoff.put(1)
    handoff.put(2)
    putting = Waiter(lambda: handoff.put(3))
    assert putting.blocked
    assert len(handoff) == 2
    assert handoff.get() == 1
    putting.outcome()
    assert handoff.take() == [2, 3]


def test_taking_everything_makes_room_and_never_waits():
    handoff = Handoff(1)
    assert handoff.take() == []
    handoff.put(1)
    putting = Waiter(lambda: handoff.put(2))
    assert putting.blocked
    assert handoff.take() == [1]
    putting.outcome()
    assert handoff.take() == [2]


@pytest.mark.parametrize("waiters", [1, 3])
@pytest.mark.parametrize("call", ["get", "put"])
def test_closing_wakes_all_who_wait(waiters, call):
    handoff = Handoff(1)
    if call == "put":
        handoff.put(0)
    waiting = [Waiter(handoff.get if call == "get" else lambda: handoff.put(1)) for _ in range(waiters)]
    assert all(waiter.blocked for waiter in waiting)
    handoff.close()
    assert all(isinstance(waiter.outcome(), Halted) for waiter in waiting)
    assert handoff.take() == ([0] if call == "put" else [])


def test_a_closed_handoff_takes_and_gives_nothing_but_can_be_emptied():
    handoff = Handoff(5)
    handoff.put("left over")
    handoff.close()
    handoff.close()
    with pytest.raises(Halted):
        handoff.get()
    with pytest.raises(Halted):
        handoff.put("late")
    assert handoff.take() == ["left over"]


def test_every_change_is_told_after_it_was_made():
    seen = []
    handoff = Handoff(5, on_change=lambda: seen.append(len(handoff)))
    handoff.put("a")
    handoff.put("b")
    handoff.get()
    handoff.close()
    assert seen == [1, 2, 1, 1]


def test_many_threads_lose_nothing_double_nothing_and_never_exceed_the_limit():
    limit, each, most = 3, 500, []
    handoff = Handoff(limit, on_change=lambda: most.append(len(handoff)))
    with ThreadPoolExecutor(8) as pool:
        puts = [
            pool.submit(lambda start=start: [handoff.put(start + i) for i in range(each)])
            for start in range(0, 4 * each, each)
        ]
        gets = [pool.submit(lambda: [handoff.get() for _ in range(each)]) for _ in range(4)]
        taken = [get.result(PATIENCE_S) for get in gets]
        for put in puts:
            put.result(PATIENCE_S)
    assert sorted(item for part in taken for item in part) == list(range(4 * each))
    for part in taken:
        for start in range(0, 4 * each, each):
            of_one = [item for item in part if start <= item < start + each]
            assert of_one == sorted(of_one)
    assert max(most) <= limit
