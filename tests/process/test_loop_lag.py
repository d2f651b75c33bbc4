"""How late an event loop is."""

import asyncio
import time

from dase_grpc.process.tasks import watch_loop_lag


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
