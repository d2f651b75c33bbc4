"""asyncio in the small: which error of a group is shown, whether a loop turns, and how late it is."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from patience import PATIENCE_S

from dase_grpc.errors import AddressError, ConfigError, DaseError, DrainingError, UnreachableError
from dase_grpc.process.tasks import first_cause, in_thread, loop_turns, unless, watch_loop_lag

REFUSALS = [DrainingError("a"), UnreachableError("b")]
BUG, OTHER_BUG = ZeroDivisionError("c"), KeyError("d")
TWO_BUGS = ExceptionGroup("several", [REFUSALS[0], BUG, OTHER_BUG])


def group(*errors):
    return ExceptionGroup("several", errors)


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (group(REFUSALS[0]), REFUSALS[0]),
        (group(*REFUSALS), REFUSALS[0]),
        (group(group(REFUSALS[1]), REFUSALS[0]), REFUSALS[1]),
        (group(BUG), BUG),
        (group(REFUSALS[0], BUG), BUG),
        (group(group(REFUSALS[0], group(BUG))), BUG),
        (TWO_BUGS, TWO_BUGS),
        *((error, error) for error in (ConfigError("x"), KeyError("y"), AddressError("z"), DaseError("d"))),
    ],
)
def test_of_a_group_its_only_bug_is_shown_or_its_first_refusal_and_other_errors_as_they_are(error, shown):
    with pytest.raises(type(shown)) as caught, first_cause():
        raise error
    assert caught.value is shown


async def test_a_cancellation_passes_through():
    async def main():
        with first_cause():
            await asyncio.Event().wait()

    task = asyncio.ensure_future(main())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_loop_that_turns_answers_and_one_that_is_stuck_does_not():
    assert await asyncio.to_thread(loop_turns(within_s=PATIENCE_S))
    with ThreadPoolExecutor() as pool:
        stuck = pool.submit(loop_turns(within_s=0.05)).result  # the loop waits for what looks at it
        assert not stuck()


def test_a_loop_that_has_ended_does_not_turn():
    async def made():
        return loop_turns(within_s=0.05)

    assert not asyncio.run(made())()


async def test_a_loop_that_is_held_up_is_late_by_that_long():
    lags: list[float] = []
    looked = asyncio.Event()

    def observe(seconds: float) -> None:
        lags.append(seconds)
        looked.set()

    watching = asyncio.create_task(watch_loop_lag(observe, every_s=0.01))
    await asyncio.sleep(0)
    time.sleep(0.2)  # noqa: ASYNC251 - what is to be noticed
    await looked.wait()
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    assert lags[0] >= 0.18
    assert min(lags) >= 0.0


async def test_nothing_begins_once_a_stop_is_there():
    begun, stop = [], asyncio.Event()
    stop.set()

    async def work() -> None:
        begun.append(True)

    assert await unless(stop, work()) is None
    assert begun == []


@pytest.mark.parametrize("fails", [False, True])
async def test_what_blocks_on_a_thread_is_waited_for_to_its_end_however_often_it_is_cancelled(fails):
    go, ended = threading.Event(), threading.Event()

    def blocking():
        go.wait(PATIENCE_S)
        ended.set()
        if fails:
            raise REFUSALS[0]

    task = asyncio.ensure_future(in_thread(blocking))
    for _ in range(3):
        await asyncio.sleep(0)
        task.cancel()
    done, _ = await asyncio.wait({task}, timeout=0.05)
    assert not done
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


async def test_what_a_thread_raises_is_raised():
    def blocking():
        raise REFUSALS[0]

    with pytest.raises(DrainingError):
        await in_thread(blocking)
