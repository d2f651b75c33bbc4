"""Fake nodes of a local cluster that fail or fall silent: who is started again, who is given up."""

import signal
from collections import Counter
from dataclasses import replace

import pytest
from children import lives
from launch.fake_cluster import quick
from replay.wire.services import eventually

from dase_grpc.errors import NodeFailedError
from dase_grpc.launch import local
from dase_grpc.replay.wire.v1.cluster_pb2 import AgentStatus, Progress, StatusResponse
from dase_grpc.runs.logs import read_restarts

BOTH = ("learner-0", "learner-1")
BROKE = "exit code 1, RuntimeError: the simulator broke"
EARLY = "exit code 0, before its last step"


@pytest.fixture
def launch(fakes):
    return lambda replay="serve", first="train", second="train", **settings: fakes(
        {"replay": replay, "learner-0": first, "learner-1": second}, **settings
    )


# -- started again ------------------------------------------------------------------------------------


async def test_a_learner_that_is_killed_is_started_again_from_its_checkpoint_while_the_other_goes_on(launch):
    cluster = launch(first="be killed, be killed, end", second="train, end")
    running = cluster.begin()
    await eventually(lambda: len(cluster.said) == 2)
    await cluster.until_waiting("learner-1")
    cluster.send("learner-1", signal.SIGKILL)
    await running
    assert cluster.restarts == [
        ("learner-0", "killed by SIGKILL", 0.01),
        ("learner-0", "killed by SIGKILL", 0.02),
        ("learner-1", "killed by SIGKILL", 0.01),
    ]
    first, *later = cluster.starts("learner-0")
    assert "--resume" not in first
    assert all([*first[:-1], "--resume", first[-1]] == each for each in later)
    assert cluster.times_started("replay") == [1]
    log = cluster.directory.logs / "learner-0.log"
    assert cluster.said[0] == (
        "learner-0 ended (killed by SIGKILL); it is started again in 0.01 s (restart 1 of 5); "
        f"its log is {log}"
    )


async def test_what_a_node_has_started_does_not_outlive_it(launch):
    cluster = launch(first="leave a simulator and be killed, train", second="leave a simulator")
    running = cluster.begin()
    await cluster.until_waiting("learner-0")
    await eventually(lambda: len(list(cluster.pids.glob("*.simulator"))) == 2)  # of a learner each
    simulators = [int(path.stem) for path in cluster.pids.glob("*.simulator")]
    await eventually(lambda: not any(map(lives, simulators)))
    assert not running.done()
    await cluster.end(running)


@pytest.mark.parametrize(
    ("replay", "whys"),
    [
        ("serve until the others train, serve", ["killed by SIGKILL"]),
        pytest.param(  # its port may be free later
            "serve briefly, refuse, refuse, serve",
            ["exit code 1", "exit code 2", "exit code 2"],
            marks=pytest.mark.slow,
        ),
    ],
)
async def test_a_replay_that_fails_is_started_again_at_its_address_and_the_learners_go_on(
    launch, replay, whys
):
    cluster = launch(replay)
    running = cluster.begin()
    await eventually(lambda: len(cluster.starts("replay")) == 1 + len(whys) or running.done())
    await cluster.end(running)
    first, *later = cluster.starts("replay")
    assert "--listen=127.0.0.1:0" in first
    anew = ["--listen=127.0.0.1:1" if each == "--listen=127.0.0.1:0" else each for each in first]
    assert later == [anew] * len(whys)
    assert cluster.times_started(*BOTH) == [1, 1]
    assert [why.partition(",")[0] for _, why, _ in cluster.restarts] == whys


@pytest.mark.parametrize(
    ("replay", "first", "failures"),
    [
        ("be killed, raise, serve", "end", [("replay", "killed by SIGKILL"), ("replay", BROKE)]),
        (  # its port may be free later
            "serve",
            "be killed, refuse, refuse, end",
            [("learner-0", "killed by SIGKILL"), *[("learner-0", "exit code 2, (empty)")] * 2],
        ),
    ],
    ids=["a replay before it has answered", "a learner that is refused at its restart"],
)
async def test_a_node_that_fails_again_is_started_again_until_it_does_not(launch, replay, first, failures):
    cluster = launch(replay, first, "end")
    await cluster.run()
    assert [(node, why) for node, why, _ in cluster.restarts] == failures
    assert cluster.times_started("learner-1") == [1]


async def test_a_learner_that_ends_well_before_its_last_step_has_failed_at_once(launch):
    cluster = launch(first="end early, train, end", second="train, end")
    running = cluster.begin()
    await cluster.until_waiting(*BOTH)
    assert "--resume" in cluster.starts("learner-0")[-1]
    assert cluster.said[0].startswith(f"learner-0 ended ({EARLY}); it is started again in 0.01 s")
    for name in BOTH:  # as somebody might who means to stop only one
        cluster.send(name, signal.SIGTERM)
    await running
    failures = [("learner-0", EARLY, 0.01), ("learner-0", EARLY, 0.02), ("learner-1", EARLY, 0.01)]
    assert sorted(cluster.restarts) == failures


# -- given up, or not to be mended --------------------------------------------------------------------


async def test_a_learner_that_fails_again_and_again_is_given_up_and_the_other_trains_to_its_end(launch):
    cluster = launch(first="train, end", second="raise")
    running = cluster.begin(limit=2)
    await eventually(lambda: len(cluster.said) == 3)
    assert not running.done()
    assert "told to end" not in cluster.log("learner-0")
    await cluster.until_waiting("learner-0")
    cluster.send("learner-0", signal.SIGKILL)  # and then it ends
    with pytest.raises(NodeFailedError) as caught:
        await running
    text = str(caught.value)
    assert text.startswith("learner-1 ended again after 2 restarts and is given up (exit code 1); the end of")
    assert text.endswith("RuntimeError: the simulator broke")
    *failures, last = cluster.restarts
    assert failures == [("learner-1", BROKE, 0.01), ("learner-1", BROKE, 0.02), ("learner-1", BROKE, None)]
    assert last == ("learner-0", "killed by SIGKILL", 0.01)
    assert cluster.log("learner-1").count("Traceback") == 3
    assert cluster.said[2].startswith(f"learner-1 is given up ({BROKE}); its log is")


@pytest.mark.slow
async def test_a_learner_that_gets_on_between_its_failures_is_given_up_too_in_the_end(launch):
    cluster = launch(first="fail a checkpoint later each time", second="end")
    with pytest.raises(NodeFailedError, match="learner-0 ended again after 20 restarts and is given up"):
        await cluster.run(limit=1)
    failures = read_restarts(cluster.directory.restarts)
    assert [each.from_step for each in failures] == [*range(1, 22)]
    assert [each.pause_s for each in failures] == [0.01] * 20 + [None]


GIVEN_UP = {
    "a learner without restarts": (
        {"first": "be killed", "second": "end"},
        0,
        r"learner-0 ended \(killed by SIGKILL\).*\n\(empty\)",
    ),
    "both learners": ({"first": "raise", "second": "raise"}, 1, r"learner-[01] ended"),
    "a learner that ends early": (
        {"first": "end early", "second": "end"},
        1,
        r"learner-0 ended before its last step although nothing failed \(does the environment end the "
        r"process\?\), again after 1 restart, and is given up \(exit code 0\); ",
    ),
    "a learner whose restarts are refused": (
        {"first": "be killed, refuse", "second": "end"},
        2,
        r"learner-0 ended again after 2 restarts and is given up \(exit code 2",
    ),
    "a replay": (
        {"replay": "serve briefly"},
        1,
        r"replay ended again after 1 restart and is given up \(exit",
    ),
    "a replay whose restarts are refused": (
        {"replay": "serve briefly, refuse"},
        2,
        r"replay ended again after 2 restarts and is given up \(exit code 2",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("behaviours", "limit", "sentence"), GIVEN_UP.values(), ids=GIVEN_UP.keys())
async def test_who_is_given_up_is_named_at_the_end_and_nobody_is_left(launch, behaviours, limit, sentence):
    cluster = launch(**behaviours)
    with pytest.raises(NodeFailedError, match=sentence):
        await cluster.run(limit=limit)
    tried = Counter(node for node, _, _ in cluster.restarts)
    assert set(tried.values()) == {limit + 1}
    assert Counter(node for node, _, pause in cluster.restarts if pause is None) == dict.fromkeys(tried, 1)
    if behaviours.get("second") == "end":
        assert "told to end" not in cluster.log("learner-1")


@pytest.mark.parametrize(
    ("behaviours", "sentence", "own"),
    [
        ({"second": "refuse"}, r"learner-1 ended \(exit code 2\)", 1),
        ({"second": "be fenced off"}, r"learner-1 ended \(exit code 3\)", 1),
        ({"second": "find the disk full"}, r"learner-1 ended \(exit code 4\)", 4),
        (
            {"replay": "serve until the disk is full"},
            r"replay ended while learners were training \(exit code 2\)",
            1,
        ),
    ],
)
async def test_a_failure_that_no_restart_would_mend_ends_the_run_at_once(launch, behaviours, sentence, own):
    cluster = launch(**behaviours)
    with pytest.raises(NodeFailedError, match=sentence) as raised:
        await cluster.run()
    assert raised.value.exit_code == own
    assert cluster.restarts == []


@pytest.mark.parametrize(
    ("replay", "sentence", "whys"),
    [
        ("refuse", r"replay could not start \(exit code 2\)", []),
        ("be killed", r"replay could not start \(killed by SIGKILL\)", ["killed by SIGKILL"] * 2),
        (
            "say nonsense",
            "replay said 'good morning' instead of its address",
            ["killed, for it did not answer"] * 2,
        ),
        (
            "import slowly",
            r"replay did not answer within 0\.5 s",
            ["killed, for it did not answer"] * 2,
        ),
    ],
)
async def test_a_replay_that_never_answers_is_ended_and_no_learner_is_started(launch, replay, sentence, whys):
    cluster = launch(replay, timing=quick(ready_s=0.5 if replay == "import slowly" else 30.0))
    with pytest.raises(NodeFailedError, match=sentence):
        await cluster.run(limit=1)
    assert [why for _, why, _ in cluster.restarts] == whys
    assert cluster.times_started("learner-0") == [0]


async def test_a_replay_that_does_not_answer_when_it_is_started_again_counts_as_failed(launch):
    cluster = launch("serve briefly, import slowly, say nonsense")
    opened = cluster.cluster(limit=2)

    def hurry(address):
        opened.timing = replace(opened.timing, ready_s=0.5)

    with pytest.raises(NodeFailedError, match="replay ended again after 2 restarts and is given up"):
        await cluster.run(opened, on_start=hurry)
    assert cluster.times_started("replay") == [3]


# -- silent -------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_replay_that_lives_and_does_not_answer_is_killed_and_started_again(launch):
    cluster = launch(timing=quick(silent_s=1.5, poll_s=0.05))
    running = cluster.begin()
    await eventually(lambda: bool(cluster.said) and cluster.times_started("replay") == [2])
    await cluster.end(running)
    assert cluster.restarts[0] == ("replay", "killed, for it was not heard of for 1.5 s", 0.01)
    assert cluster.times_started(*BOTH) == [1, 1]


class FirstOneSilent:
    """Stands for a replay's client: agent 0 has sent a heartbeat once, agent 1 always does."""

    def __init__(self, *_):
        self.answers = 0

    async def status(self, *, timeout_s):
        self.answers += 1
        leases = ("expired" if self.answers > 1 else "live", "live")
        progress = Progress(state="training")
        return StatusResponse(
            agents=[AgentStatus(agent_id=i, lease=lease, progress=progress) for i, lease in enumerate(leases)]
        )


@pytest.mark.slow
async def test_a_learner_that_lives_without_a_lease_is_killed_and_started_again(launch, monkeypatch):
    monkeypatch.setattr(local, "ClusterClient", FirstOneSilent)
    cluster = launch(first="ignore SIGTERM, end", timing=quick(silent_s=1.5, poll_s=0.02), env__timeout_s=0.1)
    running = cluster.begin()
    await eventually(lambda: bool(cluster.said) and cluster.times_started("learner-0") == [2])
    await cluster.end(running)
    why = "killed, for it was not heard of for 1.5 s"
    assert cluster.restarts == [("learner-0", why, 0.01)]
    assert cluster.said[0].startswith(f"learner-0 ended ({why}); it is started again in 0.01 s")
    assert "--resume" in cluster.starts("learner-0")[1]
    assert cluster.times_started("learner-1") == [1]
