"""Learner nodes that distil each other's policies (DPD): policies cross the network, transitions do not."""

import asyncio
from dataclasses import replace

import pytest
from contracts.sentences import assert_one_sentence
from nodes.learning_cases import FOREVER, QUICK, learner_options, learning, train
from replay.wire.services import eventually, promptly

from dase_grpc.errors import ConfigError, UnreachableError
from dase_grpc.learning.agents.dpd import PEER_VERSION
from dase_grpc.nodes.learner import run_learner
from dase_grpc.replay.client.policies import PolicyExchange
from dase_grpc.runs.checkpoint import latest, load_checkpoint
from dase_grpc.runs.directory import RunDirectory
from dase_grpc.runs.logs import read_metrics

PAIR = {"train__agents": 2, "train__method": "dpd", "dpd__publish_every": 10}


def records_of(run_dir, agent_id):
    return read_metrics(RunDirectory.open(run_dir).agent(agent_id).metrics.path)


def has_distilled(run_dir, agent_id) -> bool:
    path = run_dir / "agents" / str(agent_id) / "metrics.jsonl"
    return path.exists() and any(
        each["distilled_share"] is not None for each in records_of(run_dir, agent_id)
    )


async def test_both_learners_of_a_pair_get_each_others_policies_and_only_own_rows(service, tmp_path):
    run_dir = tmp_path / "run"
    options = [
        learner_options(service.address, run_dir, agent_id=agent_id, train__steps=FOREVER, **PAIR)
        for agent_id in (0, 1)
    ]
    async with learning(options[0]) as (first, stop_first), learning(options[1]) as (second, stop_second):
        await eventually(lambda: all(has_distilled(run_dir, agent_id) for agent_id in (0, 1)))
        stop_first.set()
        stop_second.set()
        await promptly(asyncio.gather(first, second))
    assert set(service.run.store.traffic.sampled) == {(0, 0), (1, 1)}
    for agent_id in (0, 1):
        read = records_of(run_dir, agent_id)
        assert sum(each["undistilled_updates"] for each in read) < read[-1]["updates"]
        assert sum(each["refused_policies"] for each in read) == 0
        assert {each["similarity_weight"] for each in read} == {None}
        kept = load_checkpoint(latest(run_dir / "agents" / str(agent_id) / "checkpoints"))
        updates = int(kept.tensors["updates"])
        # what was shown last has arrived before the learner left
        assert service.run.policies.versions[agent_id] == updates // 10 * 10
        assert kept.tensors[PEER_VERSION] > 0
        assert kept.tensors[PEER_VERSION] % 10 == 0


@pytest.mark.slow
async def test_learners_of_a_pair_that_are_set_up_differently_are_told_so(service, tmp_path):
    options = [
        learner_options(
            service.address,
            tmp_path / f"run{id}",
            agent_id=id,
            train__steps=3_000,
            agent__hidden=[8 + id],
            **PAIR,
        )
        for id in (0, 1)
    ]
    ends = await promptly(
        asyncio.gather(*(run_learner(each, asyncio.Event()) for each in options), return_exceptions=True)
    )
    refused = [end for end in ends if not isinstance(end, bool)]  # the other may have finished before it saw
    assert refused
    for error in refused:
        assert isinstance(error, ConfigError)
        assert_one_sentence(error, "of agent", "start both learners of the pair with the same settings")


async def test_a_lone_learner_of_a_pair_trains_on_without_its_peer(service, tmp_path):
    run_dir = tmp_path / "run"
    options = learner_options(service.address, run_dir, agent_id=1, **PAIR)
    await train(options)
    read = records_of(run_dir, 1)
    assert read[-1]["updates"] == 61
    assert sum(each["undistilled_updates"] for each in read) == 61
    assert {each["distilled_share"] for each in read} == {None}


@pytest.mark.slow
async def test_a_replay_that_takes_no_policy_at_the_end_is_said(service, tmp_path, monkeypatch):
    async def never(self) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(PolicyExchange, "flush", never)
    timing = replace(QUICK, drain_s=0.5)
    options = learner_options(service.address, tmp_path / "run", agent_id=0, timing=timing, **PAIR)
    with pytest.raises(UnreachableError, match=r"not taken the last policy within 0\.5 s"):
        await train(options)


@pytest.mark.slow
async def test_a_pair_that_was_stopped_is_resumed_and_each_knows_its_peer_at_once(service, tmp_path):
    run_dir = tmp_path / "run"

    def options(agent_id, steps, *, resume=False):
        settings = {**PAIR, "train__steps": steps}
        return learner_options(service.address, run_dir, agent_id=agent_id, resume=resume, **settings)

    first = [learning(options(agent_id, FOREVER)) for agent_id in (0, 1)]
    async with first[0] as (one, stop_one), first[1] as (other, stop_other):
        await eventually(lambda: all(has_distilled(run_dir, agent_id) for agent_id in (0, 1)))
        stop_one.set()
        stop_other.set()
        await promptly(asyncio.gather(one, other))
    kept = [load_checkpoint(latest(run_dir / f"agents/{agent_id}/checkpoints")) for agent_id in (0, 1)]
    total = max(checkpoint.step for checkpoint in kept) + 60
    again = [run_learner(options(each, total, resume=True), asyncio.Event()) for each in (0, 1)]
    await promptly(asyncio.gather(*again))
    for agent_id, before in enumerate(kept):
        after = load_checkpoint(latest(run_dir / f"agents/{agent_id}/checkpoints"))
        assert after.step == total
        assert after.tensors["peer_version"] >= before.tensors["peer_version"]
        assert service.run.policies.versions[agent_id] == after.tensors["published_version"]
        later = [each for each in records_of(run_dir, agent_id) if each["step"] > before.step]
        assert sum(each["undistilled_updates"] for each in later) == 0
