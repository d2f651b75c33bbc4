"""InferenceService: a policy's answers, computed in batches on one worker thread."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import grpc
import numpy as np

from dase_grpc.errors import DrainingError, OverloadedError, RefusalError
from dase_grpc.inference.v1 import inference_pb2, inference_pb2_grpc
from dase_grpc.inference.wire import Actions, PolicyDescription, read_observations, write_actions
from dase_grpc.metrics.calls import Calls
from dase_grpc.metrics.inference import BatchCounts
from dase_grpc.process.tasks import unless
from dase_grpc.progress import several
from dase_grpc.replay.service.interceptors import read
from dase_grpc.replay.wire.status import Context
from dase_grpc.schema import Array

THREAD: Final = "policy"
"""What the worker thread's name begins with."""

Act = Callable[[Array], Actions]
"""A policy: (B, m) float32 observations -> (B, *action_shape) actions, a new array.

It raises a RefusalError where it has no action for one of them."""


@dataclass(frozen=True)
class BatchLimits:
    """How requests are put together.

    Attributes:
        rows: observations of a batch, at most; a single request that has more is a batch of its own.
        delay_s: how long the first request of a batch waits for others, at most, once the policy is free.
        queued_rows: observations that may wait; no request has more.
    """

    rows: int
    delay_s: float
    queued_rows: int


@dataclass(eq=False)
class _Asked:
    observations: Array
    since: float
    answer: "asyncio.Future[Actions]"


class Batcher:
    """Has a policy act for many askers at once. Lives on one event loop; the policy has a thread of its own.

    A batch is what waits when the policy is free, within the limits, in the order of coming; nothing is
    reordered, and no request is torn. `clock` is in seconds from any start, `sleep` waits by that clock.
    """

    def __init__(
        self,
        act: Act,
        limits: BatchLimits,
        counts: BatchCounts,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Coroutine[Any, Any, None]] = asyncio.sleep,
    ) -> None:
        self._act, self._limits, self._counts = act, limits, counts
        self._clock, self._sleep = clock, sleep
        self._waiting: deque[_Asked] = deque()
        self._some, self._full = asyncio.Event(), asyncio.Event()

    async def act(self, observations: Array) -> Actions:
        """The actions for (B, m) observations. Cancelled before their batch begins, they are not computed.

        Raises:
            OverloadedError: too many wait already.
            RefusalError: the policy refuses these observations.
        """
        queued, most = self._counts.queued_rows, self._limits.queued_rows
        if queued + len(observations) > most:
            raise OverloadedError(
                f"{queued} of the {several(most, 'observation')} that may wait are there already; send fewer "
                f"at once, or try again later"
            )
        asked = _Asked(observations, self._clock(), asyncio.get_running_loop().create_future())
        self._enqueue(asked)
        try:
            return await asked.answer
        except asyncio.CancelledError:
            if asked in self._waiting:
                self._waiting.remove(asked)
                self._counts.queued_rows -= len(observations)
            raise

    async def run(self) -> None:
        """Computes batches until it is cancelled, and returns once the policy does not act any more."""
        worker = ThreadPoolExecutor(1, THREAD)
        try:
            while True:
                await self._fill()
                if batch := self._take():
                    await self._answer(batch, worker)
        finally:
            await asyncio.to_thread(worker.shutdown)  # the loop stays free

    def _enqueue(self, asked: _Asked) -> None:
        self._waiting.append(asked)
        self._counts.queued_rows += len(asked.observations)
        self._some.set()
        if self._counts.queued_rows >= self._limits.rows:
            self._full.set()

    async def _fill(self) -> None:
        """Waits for a first request, and for others as long as the limits say."""
        while not self._waiting:
            self._some.clear()
            await self._some.wait()
        self._full.clear()
        left_s = self._waiting[0].since + self._limits.delay_s - self._clock()
        if left_s > 0 and self._counts.queued_rows < self._limits.rows:
            await unless(self._full, self._sleep(left_s))

    def _take(self) -> list[_Asked]:
        batch: list[_Asked] = []
        rows = 0
        while self._waiting:
            size = len(self._waiting[0].observations)
            if batch and rows + size > self._limits.rows:
                break
            batch.append(self._waiting.popleft())
            rows += size
        self._counts.queued_rows -= rows
        return batch

    async def _answer(self, batch: list[_Asked], worker: ThreadPoolExecutor) -> None:
        began = self._clock()
        for asked in batch:
            self._counts.waited.observe(began - asked.since)
        await self._compute(batch, worker)

    async def _compute(self, batch: list[_Asked], worker: ThreadPoolExecutor) -> None:
        began, counts = self._clock(), self._counts
        rows = np.concatenate([asked.observations for asked in batch])
        acted = asyncio.get_running_loop().run_in_executor(worker, self._act, rows)
        await asyncio.wait([acted])
        counts.took.observe(self._clock() - began)
        counts.batches += 1
        error = acted.exception()
        if isinstance(error, RefusalError) and len(batch) > 1:  # alone, each shows whether it was meant
            for asked in batch:
                await self._compute([asked], worker)
            return
        end = 0
        for asked in batch:
            begin, end = end, end + len(asked.observations)
            if asked.answer.done():  # given up meanwhile
                continue
            if error:  # a bug has its traceback for each caller's line in the log
                asked.answer.set_exception(error)
            else:
                asked.answer.set_result(acted.result()[begin:end])
                counts.rows += end - begin


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """InferenceService over a Batcher, which holds every rule, and the description of its policy.

    The requests of streams are timed in `calls`.
    """

    def __init__(self, batcher: Batcher, policy: PolicyDescription, calls: Calls) -> None:
        self._batcher, self._policy = batcher, policy
        self._clock, self._took = calls.clock, calls.requests("ActStream")
        self._idle: set[asyncio.Task[Any]] = set()
        self._draining = False

    def drain(self) -> None:
        """Ends every stream once it has its answer, and every one to come, with DrainingError."""
        self._draining = True
        for task in self._idle:
            task.cancel()

    async def Act(self, request: inference_pb2.ActRequest, context: Context) -> inference_pb2.ActResponse:
        return write_actions(await self._batcher.act(read_observations(request, self._policy)))

    # The generated stubs know only the generator.
    async def ActStream(  # type: ignore[override]
        self, request_iterator: AsyncIterator[inference_pb2.ActRequest], context: Context
    ) -> None:
        # else a stream that ends before its first answer has no status
        await context.send_initial_metadata(())
        while (request := await self._next(context)) is not grpc.aio.EOF:
            began = self._clock()
            await context.write(await self.Act(request, context))
            self._took.observe(self._clock() - began)

    async def DescribePolicy(
        self, request: inference_pb2.DescribePolicyRequest, context: Context
    ) -> inference_pb2.DescribePolicyResponse:
        return self._policy.to_proto()

    async def _next(self, context: Context) -> Any:
        """A stream's next request, which is waited for until `drain`."""
        task = asyncio.current_task()
        assert task is not None
        self._idle.add(task)
        try:
            if not self._draining:
                return await read(context)
        except asyncio.CancelledError:
            if not self._draining:
                raise
            task.uncancel()
        finally:
            self._idle.discard(task)
        raise DrainingError("the policy server is shutting down")
