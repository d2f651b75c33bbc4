"""Heartbeats: a silence shorter than the lease is ridden out, a longer one ends the learner."""

import asyncio
from types import SimpleNamespace

import pytest

from dase_grpc.errors import StaleLeaseError, UnreachableError
from dase_grpc.nodes.learner import _heartbeats
from dase_grpc.progress import Progress
from dase_grpc.telemetry import LearnerMetrics, make_registry
from dase_grpc.wire.cluster import Membership


class ScriptedCluster:
    """Answers heartbeats by a script; the last entry is repeated."""

    def __init__(self, *answers: Exception | None) -> None:
        self.answers = list(answers)
        self.heard = 0
        self.changed = asyncio.Event()

    async def heartbeat(self, member: Membership, progress: Progress) -> None:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        self.heard += 1
        self.changed.set()
        if answer is not None:
            raise answer


def session(cluster: ScriptedCluster, *, ttl_s: float) -> SimpleNamespace:
    return SimpleNamespace(
        cluster=cluster,
        member=Membership("run", 0, 1, ttl_s=ttl_s, capacity=10, min_size=1),
        link=SimpleNamespace(unacknowledged=0, waiting=None),
        learner=SimpleNamespace(progress=Progress()),
        metrics=LearnerMetrics(make_registry(), 0),
    )


async def test_silences_shorter_than_the_lease_are_ridden_out():
    silent = UnreachableError("no answer")
    cluster = ScriptedCluster(None, silent, silent, None, silent, None)
    beating = asyncio.ensure_future(_heartbeats(session(cluster, ttl_s=0.4)))
    async with asyncio.timeout(10):
        while cluster.heard < 8:
            cluster.changed.clear()
            await cluster.changed.wait()
    assert not beating.done()
    beating.cancel()
    await asyncio.gather(beating, return_exceptions=True)


async def test_a_silence_longer_than_the_lease_ends_the_learner():
    cluster = ScriptedCluster(None, UnreachableError("no answer"))
    with pytest.raises(UnreachableError, match="no answer"):
        async with asyncio.timeout(10):
            await _heartbeats(session(cluster, ttl_s=0.2))
    assert cluster.heard > 3


async def test_a_refused_heartbeat_ends_the_learner_at_once():
    cluster = ScriptedCluster(None, StaleLeaseError("taken"))
    with pytest.raises(StaleLeaseError):
        async with asyncio.timeout(10):
            await _heartbeats(session(cluster, ttl_s=60))
    assert cluster.heard == 2
