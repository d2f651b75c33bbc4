"""A learner's session at its replay: plain calls for any thread, the network behind them on its own."""

import asyncio
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import safetensors.numpy
from safetensors import SafetensorError

from dase_grpc.config.arguments import whole
from dase_grpc.errors import DaseError, Halted, MalformedError, UsageError
from dase_grpc.process.lifecycle import HangAlarm
from dase_grpc.process.tasks import unless
from dase_grpc.progress import Progress, several
from dase_grpc.replay.buffer.policies import PolicyBytes
from dase_grpc.replay.buffer.sampling import Sampling
from dase_grpc.replay.client.admission import Joined, join_all, leases
from dase_grpc.replay.client.cluster import Lines
from dase_grpc.replay.client.compute import LearnerStreams
from dase_grpc.replay.client.handoff import USUAL, Times
from dase_grpc.replay.client.link import ReplayLink
from dase_grpc.replay.client.membership import LearnerConnection
from dase_grpc.replay.client.patience import Wanted
from dase_grpc.replay.client.policies import PolicyExchange
from dase_grpc.replay.client.shards import Shards
from dase_grpc.replay.security.dialler import NO_CREDENTIALS, Credentials
from dase_grpc.replay.wire.addresses import REPLAY_TIMEOUT_S, ReplayPlace
from dase_grpc.replay.wire.messages import Membership
from dase_grpc.schema import Array, TransitionSchema

Arrays = Mapping[str, npt.NDArray[Any]]

MAX_PREFETCH: Final = 1_024
"""A service takes as many credits at once."""


class Latest(NamedTuple):
    """A policy that an agent has published."""

    version: int
    arrays: Arrays


class Session:
    """A learner at its replay, for a program of its own, which needs neither asyncio nor torch.

    It is a block:

        with Session("127.0.0.1:50051", schema=schema) as session:
            session.store(row)
            batch = session.next()

    At the beginning of the block the learner joins the run, under a lease that a thread of the session
    renews from then on. The same thread carries rows, batches and policies, begins broken streams again, and
    looks where shards have moved. At the end of the block it sends what is left, and gives the lease back.

    Threads: `store`, `next`, `publish` and `latest` belong to one thread at a time; `progress` and the
    attributes are anybody's.

    Blocking: `store` waits while thousands of rows are not acknowledged, `next` for a batch, the block's
    beginning and end for the replay. A replay that is away is waited for up to `replay_timeout_s`. Ctrl-C
    ends each wait; in the block it leads to its end, where a second one ends the session at once.

    Errors: what ends the session is raised by whichever call comes next, or else by the block's end, as an
    error of errors.py in one sentence. StaleLeaseError: another node has the agent now. UnreachableError,
    DrainingError: the replay was away for too long, or has not acknowledged every row at the end; the
    sentence or a note beside it says how many are not. Where the block ends by an error of its own, what is
    left gets a few seconds, and that error goes on.

    Args:
        replay: HOST:PORT, several of these for a replay in shards, or dns:NAME:PORT.
        schema: of the transitions; the first learner of a run sets it, all others must have the same.
        agent: which agent of the run to be; None for the next one that is free.
        run_id: which run to join; "" for any.
        batch_size: rows of a batch.
        prefetch: batches drawn ahead of their use, 1 to 1024.
        own_rows_only: batches hold rows of this agent alone.
        own_share: this share of each batch is of this agent, the rest of others; None draws from all alike.
        follow: agents whose policies `latest` is asked for.
        in_place: on the replay's own machine, where that can be, batches are read from its ring instead of
            a stream.
        credentials: certificate or token, for a replay that asks for one.
        connect_timeout_s: how long a replay that has not answered yet is waited for.
        replay_timeout_s: how long one that has answered may be away.
        timing: how often it looks at things.

    Raises:
        AddressError: `replay` is no address.
        ConfigError: `agent`, `batch_size` or `prefetch` is no whole number, or out of range.
    """

    def __init__(
        self,
        replay: str,
        *,
        schema: TransitionSchema,
        agent: int | None = None,
        run_id: str = "",
        batch_size: int = 256,
        prefetch: int = 4,
        own_rows_only: bool = False,
        own_share: float | None = None,
        follow: Collection[int] = (),
        in_place: bool = True,
        credentials: Credentials = NO_CREDENTIALS,
        connect_timeout_s: float = 60.0,
        replay_timeout_s: float = REPLAY_TIMEOUT_S,
        timing: Times = USUAL,
    ) -> None:
        self.schema = schema
        self._place = ReplayPlace.parse(replay)
        self._wanted = Wanted(
            self._place.addresses[0],
            None if agent is None else whole("agent", agent, least=0),
            run_id,
            node_id=secrets.token_hex(8),
            timeout_s=connect_timeout_s,
            away_s=replay_timeout_s,
            credentials=credentials,
            timing=timing,
        )
        self._batch_size = whole("batch_size", batch_size, least=1)
        self._prefetch = whole("prefetch", prefetch, least=1, most=MAX_PREFETCH)
        self._sampling = Sampling(own_rows_only, own_share)
        self._follow = follow
        self._in_place = in_place
        self._numbers: dict[str, Any] = {}
        self._stop, self._given_up = asyncio.Event(), asyncio.Event()
        self._loop: asyncio.AbstractEventLoop  # made with the block
        self._thread = threading.Thread(target=self._live, name="dase session", daemon=True)
        self._left: asyncio.Future[None] | None = None  # the block has ended, well or by an error
        self._joined: Future[LearnerStreams] = Future()
        self._over = threading.Event()  # its streams have ended, if not yet its farewell
        self._ended: Future[None] = Future()

    def __enter__(self) -> Self:
        """Joins the run; waits for the replay.

        CredentialsError if the files of the credentials cannot be used, SchemaMismatchError if the run has
        another schema, AgentTakenError if another node has the agent, or another RefusalError.
        """
        if self._thread.ident is not None:
            raise UsageError("a session is for one block; make another one for the next")
        self._wanted.credentials.require_usable()
        self._loop = asyncio.new_event_loop()
        self._thread.start()
        try:
            either: list[Future[Any]] = [self._joined, self._ended]
            wait(either, return_when=FIRST_COMPLETED)
        except BaseException:
            self._give_up()
            raise
        if not self._joined.done():
            self._thread.join()
            self._ended.result()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Returns once each row is acknowledged and the lease is given back; see the class."""
        self._on_loop(self._leave, error)
        try:
            self._thread.join()
        except BaseException:
            self._give_up()
            raise
        shown = error or self._ended.exception()
        if shown is not None and (lost := self.unacknowledged):
            shown.add_note(f"{several(lost, 'transition was', 'transitions were')} not acknowledged")
        if error is None:
            self._ended.result()

    @property
    def member(self) -> Membership:
        """What the learner is in the run: run id, agent id, the lease's epoch, and the run's capacity."""
        return self._streams.shards.first.target.member

    @property
    def agent_id(self) -> int:
        """Which agent of the run the learner is."""
        return self.member.agent_id

    @property
    def agents(self) -> dict[int, int]:
        """How many rows each agent that has any has ever stored.

        As of the last heartbeat, or among more than 64 agents of one of the last ten.
        """
        stored = Counter[int]()
        for each in self._streams.shards.connections:
            stored.update(each.inserted_by_agent)
        return dict(stored)

    @property
    def buffer_size(self) -> int:
        """Rows that the buffer held at the last heartbeat."""
        return self._streams.shards.buffer_size

    @property
    def reads_in_place(self) -> bool:
        """Whether batches are read from the replay's ring now, and not from the stream."""
        return self._streams.link.reads_in_place

    @property
    def unacknowledged(self) -> int:
        """Rows that were stored and whose commit is not acknowledged yet."""
        return self._streams.link.unacknowledged

    def store(self, row: Array) -> None:
        """Hands a transition over: (width,) float32, packed as `schema` says; a copy is stored, exactly once.

        It gets the learner's agent id. Blocks while `link.QUEUED_ROWS` rows wait to be sent. MalformedError
        if it is no such row, or holds numbers that are not finite.
        """
        schema = self.schema
        if row.shape != (schema.width,) or row.dtype != np.float32:
            raise MalformedError(
                f"a transition here is a row of {schema.width} float32 numbers, not {row.dtype} of shape "
                f"{row.shape}"
            )
        own = row.copy()[np.newaxis]
        if not schema.finite(own).all():
            raise MalformedError("the transition holds a number that is not finite")
        with self._while_open() as streams:
            schema.agent_ids(own)[:] = streams.shards.first.target.member.agent_id
            streams.link.store(own[0])

    def next(self) -> tuple[Array, int] | None:
        """A batch, (B, width) float32 and read-only, and how many rows the buffer holds.

        Blocks until it is there. None if it is better to go on exploring: the buffer does not hold enough
        yet, or the replay is away and rows can still be kept for it.
        """
        with self._while_open() as streams:
            return streams.link.next()

    def publish(self, version: int, policy: bytes | Arrays) -> None:
        """Makes a policy the agent's latest, for actors, evaluators and peers; arrays go as safetensors.

        Never blocks. Of policies that come faster than they are sent, the latest counts; `version` is how
        many updates it has had, and a ValueError if it is lower than one before.
        """
        with self._while_open() as streams:
            streams.exchange.publish(version, policy)

    def latest(self, agent: int) -> Latest | None:
        """The policy that an agent of `follow` has published last; None if none has come yet. Never blocks.

        DaseError if it is none of arrays.
        """
        with self._while_open() as streams:
            policy: Latest | None = streams.exchange.latest(agent)
            return policy

    def progress(self, **numbers: Any) -> None:
        """Sets fields of `Progress` that the cluster's status shows of this learner; never blocks.

        Until it is set, `step` is how many rows were stored and `state` is "training".
        """
        replace(Progress(), **numbers)
        self._numbers = {**self._numbers, **numbers}

    @property
    def _streams(self) -> LearnerStreams:
        if not self._joined.done():
            raise UsageError("a session begins with its block; write `with Session(...) as session:`")
        return self._joined.result()

    @contextmanager
    def _while_open(self) -> Iterator[LearnerStreams]:
        """The streams; raises what has ended the session instead of being told that it has."""
        streams = self._streams
        if self._over.is_set():
            self._raise_end()
        try:
            yield streams
        except Halted:
            self._raise_end()
        except RuntimeError:  # of a loop that has been closed in between
            if not self._over.is_set():
                raise
            self._raise_end()

    def _raise_end(self) -> None:
        self._thread.join()
        self._ended.result()
        raise UsageError("the session has ended; begin another one")

    def _on_loop(self, call: Callable[..., object], *arguments: object) -> None:
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call, *arguments)

    def _give_up(self) -> None:
        self._on_loop(self._given_up.set)
        self._thread.join()
        self._ended.exception()

    def _leave(self, error: BaseException | None) -> None:
        if self._left is None or self._left.done():
            return
        if isinstance(error, Exception):
            self._left.set_exception(DaseError(f"{type(error).__name__}: {error}"))
            return
        if error is not None:  # Ctrl-C: what is collected counts, but nobody waits for a replay that is away
            self._stop.set()
        self._left.set_result(None)

    def _live(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(unless(self._given_up, self._work()))
        except BaseException as error:  # noqa: BLE001 - raised on the caller's thread
            self._ended.set_exception(error)
        else:
            self._ended.set_result(None)

    async def _work(self) -> None:
        self._left = asyncio.get_running_loop().create_future()
        async with Lines(self._place, self._wanted.credentials) as lines:
            joined = await join_all(lines, self._wanted, self.schema)
            async with leases(joined.targets) as farewell:
                streams = self._opened(joined, lines)
                try:
                    self._joined.set_result(streams)
                    await streams.run(
                        self._left,
                        self._stop,
                        halt=lambda: self._leave(None),
                        progress=self._shown,
                        alarm=HangAlarm(asyncio.get_running_loop()),
                    )
                    farewell.reason = f"left after {several(streams.link.stored, 'transition')}"
                finally:
                    self._over.set()
                    farewell.targets = [each.target for each in streams.shards.connections]
                    farewell.progress = self._shown()

    def _opened(self, joined: Joined, lines: Lines) -> LearnerStreams:
        wanted = self._wanted
        named = partial(LearnerConnection, asks_of_all=True, timeout_s=wanted.away_s, timing=wanted.timing)
        shards = Shards(joined.connected(lines, named))
        link = ReplayLink(
            shards,
            batch_size=self._batch_size,
            prefetch=self._prefetch,
            writer_id=f"learner-{joined.member.agent_id}",
            sampling=self._sampling,
            explores_first=True,
            in_place=self._in_place,
        )
        exchange = PolicyExchange(shards.first, follow=self._follow, pack=_packed, unpack=_unpacked)
        exchange.steps = lambda: link.stored
        return LearnerStreams(shards, link, exchange, lines)

    def _shown(self) -> Progress:
        link = self._streams.link
        wait = link.wait  # asked once: the compute thread may end it at any time
        progress = replace(Progress(step=link.stored, state="training"), **self._numbers)
        return progress if wait is None else replace(progress, state=wait.state)


def _packed(policy: bytes | Arrays) -> bytes:
    if isinstance(policy, bytes):
        return policy
    return safetensors.numpy.save({name: np.ascontiguousarray(each) for name, each in policy.items()})


def _unpacked(policy: PolicyBytes) -> Latest:
    try:
        return Latest(policy.version, safetensors.numpy.load(policy.payload))
    except (KeyError, TypeError, ValueError, SafetensorError) as error:
        raise DaseError(
            f"policy {policy.version} of agent {policy.agent_id} cannot be read: {len(policy.payload)} bytes "
            f"are not arrays in safetensors format"
        ) from error
