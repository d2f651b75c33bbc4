"""ReplayLink: beside a learner's rows (insert.py), the batches that its compute thread takes."""

from collections.abc import Callable

import numpy as np

from dase_grpc.replay.client.collected import CollectedSteps
from dase_grpc.replay.client.insert import RowLink
from dase_grpc.replay.client.sample import BatchFetcher, BatchQueue, OneFetcher
from dase_grpc.replay.client.sharded_sample import ShardedFetcher
from dase_grpc.replay.client.shards import Shards
from dase_grpc.replay.client.waits import Wait, Waited, WaitReason
from dase_grpc.schema import Array


class ReplayLink(RowLink):
    """The learner's sink and source over the network.

    `next` belongs to the compute thread and blocks, as `store` does. No batch is drawn before the first
    one is asked for, and at most `prefetch` are drawn ahead of their use (sample.py); Sample streams begin
    again when they break, too. While the replay is away, or came back with too little to draw from, `next`
    gives no batch, so that the learner explores on, for as long as the queue of `store` has room. After
    `hold_batches` no batch is drawn either before the next is asked for. With `explores_first` it gives none
    while the buffer holds too little for a first one, either. With `collected` the agent's actors
    explore: batches come at the pace of their steps, and `next` waits for them in any case.
    """

    def __init__(
        self,
        shards: Shards,
        *,
        batch_size: int,
        prefetch: int,
        writer_id: str,
        own_rows_only: bool = False,
        rng: np.random.Generator | None = None,
        collected: CollectedSteps | None = None,
        explores_first: bool = False,
        count_acknowledged: Callable[[int], None] = lambda rows: None,
    ) -> None:
        super().__init__(shards, writer_id=writer_id, count_acknowledged=count_acknowledged)
        self._batches = BatchQueue(prefetch, one_by_one=collected is not None)
        self._collected = collected
        self._explores_first = explores_first
        if collected is not None:
            collected.on_wait = self._batches.ask
        self._fetcher: BatchFetcher = (
            OneFetcher(
                shards.first,
                self._batches,
                batch_size=batch_size,
                own_rows_only=own_rows_only,
                pacing=None if collected is None else collected.pacing,
            )
            if len(shards.connections) == 1
            else ShardedFetcher(
                shards,
                self._batches,
                batch_size=batch_size,
                own_rows_only=own_rows_only,
                rng=np.random.default_rng() if rng is None else rng,
            )
        )
        self._no_batch = Waited()

    def next(self) -> tuple[Array, int] | None:
        """The next batch; blocks until it is there, or gives None if it is better to explore meanwhile."""
        self._no_batch.begin()
        batch = self._batches.next(unless=self._explore_on)
        if batch is not None or self._batches.held:
            self._no_batch.end()
        return batch

    def begin_anew(self) -> None:
        """`hold_batches`, and counts the steps of the agent's actors from now on."""
        self.hold_batches()
        if self._collected is not None:
            self._collected.begin_anew(self._batches.taken)

    @property
    def prefetched(self) -> int:
        """Batches that are here and not used yet."""
        return len(self._batches)

    @property
    def starved(self) -> bool:
        """Whether the compute thread waits for what its actors are to collect."""
        return self._collected is not None and (self._collected.waiting or self._no_batch.since is not None)

    @property
    def wait(self) -> Wait | None:
        """What the compute thread has been without since more than `SAY_AFTER_S`, if it has."""
        waited = self._no_batch
        if self._collected is not None and self._collected.missing.long:
            waited = self._collected.missing
        if self._no_room.long or not waited.long:
            return super().wait
        if (away := self._away(waited)) is not None:
            return away
        if (waiting := self._fetcher.waiting) is not None:
            reason = WaitReason.WARM_UP if self._collected is None else WaitReason.STEPS
            return Wait(waited, reason, waiting, exploring=self._explore_on())
        return Wait(waited, WaitReason.BATCH, "waiting for the replay service to send a batch")

    def hold_batches(self) -> None:
        """Lets a wait for a batch end without one; draws none before `next` is called again.

        On the event loop; a Sample stream that is open already goes on.
        """
        self._batches.hold()

    def stop_batches(self) -> None:
        """Ends the compute thread's waits for batches, and for what its actors collect."""
        self._batches.close()
        if self._collected is not None:
            self._collected.close()

    def close(self) -> None:
        """Ends every wait of the compute thread, for good."""
        self._batches.close()
        super().close()
        if self._collected is not None:
            self._collected.close()

    async def fetch_batches(self) -> None:
        """Keeps up to `prefetch` batches drawn ahead, from the first one asked for.

        Runs until cancelled; after `stop_batches` until one more batch has come.
        """
        await self._fetcher.run()

    def _explore_on(self) -> bool:
        """Whether the compute thread, which finds no batch, had better explore than wait for one."""
        if self._batches.held:
            return True
        if self._rows.full or self._collected is not None:
            return False
        shrunk = self._explores_first or self._batches.delivered or self._shards.losses
        short = self._fetcher.waiting is not None
        return bool(shrunk and short) or self._shards.away is not None
