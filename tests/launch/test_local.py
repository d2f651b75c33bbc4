"""A local cluster of fake nodes: what they are told, in which order they end, and who is left."""

import asyncio

import pytest
from launch.fake_cluster import NullDisplay, quick
from replay.wire.services import eventually

from dase_grpc.errors import NodeFailedError

BOTH = ("learner-0", "learner-1")


@pytest.fixture
def launch(fakes):
    return lambda replay="serve", first="end", second="end", **settings: fakes(
        {"replay": replay, "learner-0": first, "learner-1": second}, **settings
    )


# -- a good run ---------------------------------------------------------------------------------------


async def test_a_run_ends_when_all_learners_have_ended_and_nobody_is_left(launch):
    cluster = launch()
    await cluster.run()
    assert "told to end" not in cluster.log("learner-0")
    assert cluster.said == []
    assert "--metrics-port=0" in cluster.starts("replay")[0]  # off
    assert "--metrics-port=0" in cluster.starts("learner-1")[0]


async def test_nodes_are_told_what_the_configuration_says(launch):
    cluster = launch(train__seed=3, train__threads=2, replay__capacity="1MiB", metrics__port=9_000)
    await cluster.run(gpus=(1,))
    path = cluster.directory.path
    assert cluster.starts("replay") == [
        [
            *("node", "--stdin-is-leash", "--role=replay", "--listen=127.0.0.1:0", "--capacity=1MiB"),
            *("--min-size=20", "--seed=3", "--run-id=run", "--metrics-port=9000"),
            *(f"--data-dir={path / 'replay'}", "OMP=2"),
        ]
    ]
    assert cluster.starts("learner-1") == [
        [
            *("node", "--stdin-is-leash", "--role=learner", "--replay=127.0.0.1:1", "--agent=1"),
            *(f"--config={path / 'run.toml'}", f"--run-dir={path}", "--metrics-port=9002"),
            *("--gpu=1", "OMP=2"),
        ]
    ]


async def test_learners_take_the_gpus_in_turn_and_keep_theirs_when_they_are_started_again(fakes):
    learners = {f"learner-{agent}": "end" for agent in range(3)} | {"learner-1": "be killed, end"}
    cluster = fakes({"replay": "serve", **learners}, train__agents=3)
    await cluster.run(gpus=(4, 2))
    starts = {name: cluster.starts(name) for name in learners}
    told = {
        name: [flag for start in found for flag in start if flag.startswith("--gpu")]
        for name, found in starts.items()
    }
    assert told == {
        "learner-0": ["--gpu=4"],
        "learner-1": ["--gpu=2", "--gpu=2"],
        "learner-2": ["--gpu=4"],
    }


async def test_an_environment_that_prints_a_lot_blocks_nobody_and_lands_in_the_log(launch):
    cluster = launch(first="flood")
    await cluster.run()
    assert len(cluster.log("learner-0")) > 1_000_000


# -- stopping -----------------------------------------------------------------------------------------


async def test_stop_lets_the_learners_drain_before_the_replay_goes(launch):
    cluster = launch(first="train", second="train")
    running = cluster.begin()
    await cluster.until_waiting(*BOTH)
    await cluster.end(running)
    assert all("told to end" in cluster.log(name) for name in BOTH)
    (sentence,) = cluster.said
    assert sentence.startswith("stopping: ")


@pytest.mark.parametrize(
    ("replay", "learner", "started"),
    [("serve", "end", ()), ("import slowly", "end", ("replay",)), ("serve", "import slowly", BOTH)],
    ids=["before anything has started", "before the replay answers", "while learners are still importing"],
)
async def test_a_stop_at_any_time_is_a_good_end(launch, replay, learner, started):
    cluster = launch(replay, learner, learner)
    running = cluster.begin()
    await eventually(lambda: all((cluster.pids / f"{name}.pid").exists() for name in started))
    await cluster.end(running)


@pytest.mark.parametrize(
    ("replay", "first", "resting"),
    [("serve until the others train, serve", "train", "replay"), ("serve", "be killed", "learner-0")],
)
async def test_a_stop_while_a_node_waits_for_its_restart_is_a_good_end(launch, replay, first, resting):
    cluster = launch(replay, first, "train", timing=quick(first_pause_s=30.0))
    running = cluster.begin()
    await eventually(lambda: len(cluster.said) == 1)
    await cluster.end(running)
    assert cluster.times_started(resting) == [1]


async def test_a_learner_that_fails_to_drain_makes_the_stop_a_failure(launch):
    cluster = launch(first="ignore SIGTERM", second="train", timing=quick(stop_s=0.2))
    running = cluster.begin()
    await cluster.until_waiting(*BOTH)
    with pytest.raises(NodeFailedError, match=r"learner-0 ended \(killed by SIGKILL\)"):
        await cluster.end(running)


async def test_cancelling_kills_what_does_not_end_at_once(launch):
    cluster = launch(first="ignore SIGTERM", second="train")
    running = cluster.begin()
    await cluster.until_waiting(*BOTH)
    running.cancel()
    await eventually(lambda: "told to end" in cluster.log("learner-1"))
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_killing_a_cluster_leaves_nobody(launch):
    cluster = launch(first="ignore SIGTERM", second="train")
    opened = cluster.cluster(limit=0)
    running = cluster.begin(cluster=opened)
    await cluster.until_waiting(*BOTH)
    opened.kill()
    with pytest.raises(NodeFailedError, match="killed by SIGKILL"):
        await running


async def test_waiting_may_be_cancelled_and_taken_up_again(launch):
    cluster = launch(first="train", second="train")
    async with cluster.cluster() as running:
        await running.start()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await running.wait()
        await running.stop_learners()
        await running.wait()


async def test_a_program_that_is_not_there_leaves_nothing_behind(launch):
    cluster = launch()
    cluster.program = ("/no/such/program",)
    with pytest.raises(FileNotFoundError, match="/no/such/program"):
        await cluster.run()


async def test_a_display_that_fails_ends_the_nodes(launch):
    class Broken(NullDisplay):
        def __enter__(self):
            raise ValueError("no such terminal")

    cluster = launch(first="train", second="train")
    cluster.display = Broken()
    with pytest.raises(ValueError, match="no such terminal"):
        await cluster.run()


# -- actors -------------------------------------------------------------------------------------------

EXPLORE = "explore until all is learned"


@pytest.fixture
def with_actors(fakes):
    def make(actor=EXPLORE, other=EXPLORE, learner="end", **settings):
        behaviours = {"replay": "serve", "learner-0": learner, "actor-0-0": actor, "actor-0-1": other}
        changes = {"train__agents": 1, "train__actors": 2, "train__explore": False, **settings}
        return fakes(behaviours, **changes)

    return make


async def test_actors_are_told_whose_they_are_and_end_after_their_learner(with_actors):
    cluster = with_actors(metrics__port=9_000)
    await cluster.run()
    config = f"--config={cluster.directory.path}/run.toml"
    for index in (0, 1):
        assert cluster.starts(f"actor-0-{index}") == [
            [
                *("node", "--stdin-is-leash", "--role=actor", "--replay=127.0.0.1:1", "--agent=0"),
                *(config, f"--metrics-port={9_002 + index}", "OMP=1"),
            ]
        ]
        assert "has finished" in cluster.log(f"actor-0-{index}")
    assert cluster.said == []


async def test_an_actor_that_is_killed_is_started_again(with_actors):
    cluster = with_actors(actor=f"be killed, {EXPLORE}")
    await cluster.run()
    assert [node for node, _, _ in cluster.restarts] == ["actor-0-0"]
    assert cluster.times_started("actor-0-0") == [2]


async def test_an_actor_whose_settings_are_refused_ends_the_run(with_actors):
    cluster = with_actors(actor="refuse", learner="train")
    with pytest.raises(NodeFailedError, match="actor-0-0 ended"):
        await cluster.run()


async def test_actors_that_stay_when_their_learner_has_ended_are_ended(with_actors):
    cluster = with_actors(actor="train", other="train", timing=quick(actors_end_s=0.1))
    await cluster.run()
    assert "told to end" in cluster.log("actor-0-0")


async def test_on_a_signal_actors_end_before_their_learner(with_actors):
    cluster = with_actors(actor="train", other="train", learner="train")
    running = cluster.begin()
    await cluster.until_waiting("learner-0", "actor-0-0", "actor-0-1")
    await cluster.end(running)
    logs = [cluster.directory.logs / f"{name}.log" for name in ("actor-0-1", "learner-0")]
    ends = [log.stat().st_mtime_ns for log in logs]
    assert ends == sorted(ends)
