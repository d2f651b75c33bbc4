"""A batcher: what is computed together, for how long a request waits, and who gets which action."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest
from contracts.sentences import refuses
from inference.policies import REFUSED, HeldPolicy, acts, policy_threads, rows
from replay.wire.services import Clock, eventually, promptly

from dase_grpc.errors import MalformedError, OverloadedError
from dase_grpc.inference.service import Batcher, BatchLimits
from dase_grpc.metrics.inference import BatchCounts


@dataclass
class Sleeper:
    """Notes for how long it was to sleep, and wakes when told to."""

    asked_s: list[float] = field(default_factory=list)
    over: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, seconds: float) -> None:
        self.asked_s.append(seconds)
        await self.over.wait()


@dataclass
class Running:
    """A batcher at work, and the world around it."""

    batcher: Batcher
    policy: HeldPolicy
    counts: BatchCounts
    clock: Clock
    sleeper: Sleeper
    task: "asyncio.Task[None]"

    async def ask(self, *firsts: float) -> "asyncio.Task[np.ndarray]":
        """A request that waits, or is being computed, when this returns."""
        task = asyncio.ensure_future(self.batcher.act(rows(*firsts)))
        await asyncio.sleep(0)
        return task

    async def busy(self, *firsts: float) -> "asyncio.Task[np.ndarray]":
        """A request that is being computed when this returns."""
        task = await self.ask(*firsts)
        await promptly(asyncio.to_thread(self.policy.begun.acquire))
        return task


@asynccontextmanager
async def batching(*, of: int = 64, delay_s: float = 0.0, queue: int = 100) -> AsyncIterator[Running]:
    policy, counts, clock, sleeper = HeldPolicy(), BatchCounts(), Clock(100.0), Sleeper()
    batcher = Batcher(policy, BatchLimits(of, delay_s, queue), counts, clock=clock, sleep=sleeper)
    task = asyncio.ensure_future(batcher.run())
    try:
        yield Running(batcher, policy, counts, clock, sleeper, task)
    finally:
        task.cancel()
        await promptly(asyncio.gather(task, return_exceptions=True))
    assert policy_threads() == []


async def test_what_waits_while_the_policy_is_busy_is_computed_together_and_each_gets_its_own():
    async with batching() as running:
        with running.policy.held():
            first = await running.busy(1)
            others = [await running.ask(*firsts) for firsts in ([2, 3], [4], [5, 6, 7])]
        for asked, firsts in zip([first, *others], ([1], [2, 3], [4], [5, 6, 7]), strict=True):
            assert (await promptly(asked) == acts(rows(*firsts))).all()
        assert running.policy.sizes == [1, 6]
        assert (running.counts.rows, running.counts.batches, running.counts.queued_rows) == (7, 2, 0)


async def test_a_batch_is_no_larger_than_the_limit_and_tears_no_request_but_one_request_may_be_larger():
    async with batching(of=3) as running:
        with running.policy.held():
            asked = [await running.busy(0)]
            asked += [await running.ask(*firsts) for firsts in ([1, 2], [3, 4], [5], [6, 7, 8, 9], [10])]
        await promptly(asyncio.gather(*asked))
        assert running.policy.sizes == [1, 2, 3, 4, 1]


async def test_without_a_delay_a_request_is_computed_at_once():
    async with batching() as running:
        assert (await promptly(running.batcher.act(rows(3))) == acts(rows(3))).all()
        assert running.sleeper.asked_s == []


async def test_a_request_waits_for_others_as_long_as_the_delay_and_no_longer():
    async with batching(delay_s=0.5) as running:
        asked = [await running.ask(1), await running.ask(2)]
        await eventually(lambda: running.sleeper.asked_s == [0.5])
        assert running.policy.sizes == []
        running.sleeper.over.set()
        await promptly(asyncio.gather(*asked))
        assert running.policy.sizes == [2]


async def test_the_time_that_a_request_has_waited_for_the_policy_counts_as_delay():
    async with batching(delay_s=0.5) as running:
        running.sleeper.over.set()
        with running.policy.held():
            await running.busy(1)
            asked = [await running.ask(2)]
            running.clock.now += 0.2
            asked.append(await running.ask(3))
        await promptly(asyncio.gather(*asked))
        assert running.sleeper.asked_s == [0.5, pytest.approx(0.3)]
        with running.policy.held():
            await running.busy(4)
            late = await running.ask(5)
            running.clock.now += 0.6
        await promptly(late)
        assert len(running.sleeper.asked_s) == 3  # only for the one before


async def test_a_full_batch_does_not_wait_for_the_delay():
    async with batching(of=2, delay_s=0.5) as running:
        first = await running.ask(1)
        await eventually(lambda: running.sleeper.asked_s == [0.5])
        await promptly(asyncio.gather(first, await running.ask(2)))
        assert running.policy.sizes == [2]


async def test_beyond_the_queue_requests_are_refused_and_what_is_computed_is_not_in_it():
    async with batching(queue=4) as running:
        with running.policy.held():
            asked = [await running.busy(1), await running.ask(2, 3, 4)]
            with refuses(OverloadedError, "3 of the 4 observations that may wait are there already"):
                await running.batcher.act(rows(5, 6))
            asked.append(await running.ask(7))
        await promptly(asyncio.gather(*asked))
        assert running.policy.sizes == [1, 4]


async def test_what_nobody_waits_for_any_more_is_not_computed_and_frees_its_place():
    async with batching(queue=2) as running:
        with running.policy.held():
            busy = await running.busy(1)
            given_up, kept = await running.ask(2), await running.ask(3)
            for asked in (given_up, busy):
                asked.cancel()
                await promptly(asyncio.gather(asked, return_exceptions=True))
            assert running.counts.queued_rows == 1
            late = await running.ask(4)
        assert (await promptly(kept) == acts(rows(3))).all()
        assert (await promptly(late) == acts(rows(4))).all()
        assert running.policy.sizes == [1, 2]


async def test_a_delay_in_which_the_only_request_is_given_up_computes_nothing():
    async with batching(delay_s=0.5) as running:
        asked = await running.ask(1)
        await eventually(lambda: running.sleeper.asked_s == [0.5])
        asked.cancel()
        running.sleeper.over.set()
        assert (await promptly(running.batcher.act(rows(2))) == acts(rows(2))).all()
        assert running.policy.sizes == [1]


async def test_a_bug_of_the_policy_is_raised_for_each_of_its_batch_and_the_next_is_answered():
    async with batching() as running:
        running.policy.fails = True
        with pytest.raises(ZeroDivisionError):
            await promptly(running.batcher.act(rows(1)))
        running.policy.fails = False
        assert (await promptly(running.batcher.act(rows(2))) == acts(rows(2))).all()


async def test_what_the_policy_refuses_is_refused_of_that_request_alone():
    async with batching() as running:
        with running.policy.held():
            first = await running.busy(1)
            asked = [await running.ask(2), await running.ask(3, REFUSED), await running.ask(4, 5)]
        with refuses(MalformedError, "no action for such an observation"):
            await promptly(asked[1])
        assert (await promptly(asked[0])).tolist() == acts(rows(2)).tolist()
        assert (await promptly(asked[2])).tolist() == acts(rows(4, 5)).tolist()
        await promptly(first)
        assert running.policy.sizes == [1, 5, 1, 2, 2]
        assert running.counts.rows == 4


async def test_only_observations_that_were_answered_are_counted():
    async with batching() as running:
        running.policy.fails = True
        with pytest.raises(ZeroDivisionError):
            await promptly(await running.ask(1))
        running.policy.fails = False
        with running.policy.held():
            given_up, waits = await running.busy(2), await running.ask(3)
            given_up.cancel()
        await promptly(waits)
        assert (running.counts.rows, running.counts.batches) == (1, 3)


async def test_how_long_requests_waited_and_the_policy_took_is_counted():
    async with batching() as running:
        with running.policy.held():
            asked = [await running.busy(1), await running.ask(2)]
            running.clock.now += 0.25
        await promptly(asyncio.gather(*asked))
        assert running.counts.waited.read()[1] == pytest.approx(0.25)
        assert running.counts.took.read()[1] == pytest.approx(0.25)
