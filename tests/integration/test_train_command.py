"""`dase train` as a person runs it: real processes, real gRPC, and every way in which it can end."""

import fcntl
import os
import pty
import re
import select
import signal
import socket
import struct
import termios

import pytest
from integration.commands import ENDLESS, Train, assert_kept_until_the_end
from patience import PATIENCE_S
from small import small_flags

from dase_grpc.errors import RunDirectoryError
from dase_grpc.launch.resume import ResumeOptions, resume_here
from dase_grpc.runs.checkpoint import latest, load_checkpoint
from dase_grpc.runs.directory import checkpoint_path
from dase_grpc.runs.logs import read_evaluations, read_metrics, read_restarts

pytestmark = pytest.mark.slow


# -- a run that ends well -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Train:
    run = Train(tmp_path_factory.mktemp("finished"), *small_flags(train__steps=300))
    assert run.end() == 0, run.output
    return run


def test_a_run_leaves_everything_in_its_folder(finished):
    directory = finished.directory
    assert directory.config.train.steps == 300
    assert directory.run["mode"] == "cluster"
    assert directory.report.is_file()
    assert [agent.agent_id for agent in directory.agents()] == [0, 1]
    for agent in directory.agents():
        assert read_evaluations(agent.evaluations.path).step.tolist() == [0, 50, 100, 150, 200, 250, 300]
        assert read_metrics(agent.metrics.path)[-1]["updates"] == 281
        path = latest(agent.checkpoints)
        assert path is not None
        assert path.name == "step-000000300"


def test_a_run_exchanges_every_transition_through_the_replay(finished):
    assert "the buffer held 600 transitions, no agent was left" in finished.log("replay")
    similarity = [
        record["similarity"]
        for agent in finished.directory.agents()
        for record in read_metrics(agent.metrics.path)
    ]
    assert {"0", "1"} in map(set, similarity)


def test_a_run_says_where_it_stands_and_where_the_results_are(finished):
    lines = finished.output.splitlines()
    assert lines[0] == "2 TD3 agents sharing one replay on worlds:PointGoal, 300 steps each, seed 0"
    assert "step 0 of 0" not in finished.output
    assert any(re.match(r"agent 1: step 300 of 300, .*, finished$", line) for line in lines)
    assert any(
        re.match(r"agent 0: evaluation return -[\d.]+ at step 0, -[\d.]+ at step 300$", x) for x in lines
    )
    assert lines[-1].endswith(f" -m dase_grpc evaluate runs/{finished.name}")


def test_a_run_leaves_no_process_and_no_port(finished):
    assert finished.nodes() == {}
    match = re.search(r"joined run .* at 127\.0\.0\.1:(\d+)", finished.log("learner-0"))
    assert match is not None
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(match[1])), timeout=PATIENCE_S)


# -- the other ends -----------------------------------------------------------------------------------


def test_ctrl_c_on_a_terminal_drains_keeps_checkpoints_and_exits_0(train):
    screen, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    run = train(*small_flags(train__steps=ENDLESS), stdout=terminal)
    os.close(terminal)
    text, told = "", False
    while chunk := read_screen(screen):
        text += chunk
        if (
            not told
            and re.search(r"1 .* [\d.e-]+ +training", text)
            and all(len(run.curve(each)) > 2 for each in (0, 1))
        ):
            run.process.send_signal(signal.SIGINT)
            told = True
    os.close(screen)
    assert run.end() == 0
    assert run.nodes() == {}
    for title in ("evaluation", "updates/s", "similarity λ", "10,000,000 steps each, buffer"):
        assert title in text
    shown, _, after = text.rpartition("\x1b[?25h")  # the cursor is back before the nodes have ended
    assert "\x1b[?25l" in shown
    assert "stopping: the learners send what is left and keep their checkpoints" in after
    assert f"results: runs/{run.name}" in after
    assert_kept_until_the_end(run.directory)
    assert "no agent was left" in run.log("replay")
    assert "stopped after" in run.log("learner-0")


def read_screen(screen: int) -> str:
    """What the terminal shows next; nothing once the program has ended."""
    ready, _, _ = select.select([screen], [], [], PATIENCE_S)
    assert ready, "nothing was shown for a long time"
    try:
        return os.read(screen, 65_536).decode(errors="replace")
    except OSError:  # how Linux says that nobody holds the other side any more
        return ""


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param({"replay__sampling": "prioritised", "replay__own_share": 0.5}, id="prioritised"),
        pytest.param({}, id="uniform", marks=pytest.mark.long),
    ],
)
def test_a_killed_learner_and_a_killed_replay_are_started_again_and_the_run_reaches_its_end(train, sampling):
    run = train(*small_flags(train__steps=1_500, train__checkpoint_every=100, eval__every=400, **sampling))
    run.until(lambda: all(latest(run.agent(each).checkpoints) for each in (0, 1)))
    os.kill(run.nodes()["agent=1"], signal.SIGKILL)
    run.until(lambda: "learner-1 ended (killed by SIGKILL); it is started again in 1 s" in run.output)
    os.kill(run.nodes()["replay"], signal.SIGKILL)
    assert run.end() == 0, run.output
    assert run.nodes() == {}
    assert "replay ended (killed by SIGKILL); it is started again in 1 s (restart 1 of 5)" in run.output
    for node in ("learner-1", "replay"):
        log = run.directory.logs / f"{node}.log"
        note = f"note: {node} was started again once (killed by SIGKILL); its log is {log}"
        assert note in run.output.splitlines()
    assert {each.node: each.why for each in read_restarts(run.directory.restarts)} == {
        "learner-1": "killed by SIGKILL",
        "replay": "killed by SIGKILL",
    }
    learner = next(each for each in read_restarts(run.directory.restarts) if each.node == "learner-1")
    assert learner.from_step is not None
    assert learner.from_step > 0
    assert f"resuming from {checkpoint_path(run.agent(1).checkpoints, learner.from_step)}" in run.log(
        "learner-1"
    )
    assert re.search(r"restored run .*: \d+ transitions of 2 writers", run.log("replay"))
    assert "without its data" not in run.log("learner-0")
    assert "resuming" not in run.log("learner-0")
    for agent_id in (0, 1):
        kept = load_checkpoint(latest(run.agent(agent_id).checkpoints))
        assert kept.step == 1_500
        assert run.curve(agent_id).step.tolist() == [0, 400, 800, 1_200, 1_500]
        found = [record["largest_priority"] for record in read_metrics(run.agent(agent_id).metrics.path)]
        assert any(found) == bool(sampling)
    assert "started again once (killed by SIGKILL)" in run.directory.report.read_text()


@pytest.mark.long  # tests/launch/test_lockstep_dpd.py and others do so in one process
@pytest.mark.parametrize(
    "mode",
    [pytest.param((), id="cluster"), pytest.param(("--lockstep",), id="lockstep")],
)
def test_a_pair_that_distils_trains_to_the_end_and_is_reported_as_such(train, mode):
    # no batch before both have stored their 20 random steps, so neither can be done before the other comes
    together = {"replay__min_size": 40}
    flags = small_flags(train__steps=400, dpd__publish_every=20, eval__every=200, **together)
    run = train("--method", "dpd", *mode, *flags)
    assert run.end() == 0, run.output
    assert "2 TD3 agents that distil each other's policies" in run.output
    for agent_id in (0, 1):
        read = read_metrics(run.directory.agent(agent_id).metrics.path)
        assert any(record["distilled_share"] is not None for record in read)
        assert {record["similarity_weight"] for record in read} == {None}
        kept = load_checkpoint(latest(run.directory.agent(agent_id).checkpoints))
        assert kept.config.method == "dpd"
        assert kept.tensors["peer_version"] > 0
    assert "Distillation" in run.directory.report.read_text()


@pytest.mark.long  # tests/launch/test_lockstep_dpd.py and others do so in one process
@pytest.mark.parametrize(
    "mode",
    [pytest.param((), id="cluster"), pytest.param(("--lockstep",), id="lockstep")],
)
def test_agents_of_different_algorithms_share_one_buffer(train, mode):
    # no batch before all have stored their 20 random steps, so none can be done before the others come
    together = {} if mode else {"replay__min_size": 60}
    flags = small_flags(train__agents=3, train__steps=200, **together)
    run = train("--algo", "td3,sac,ddpg", *mode, *flags)
    assert run.end() == 0, run.output
    assert "3 agents (TD3, SAC, DDPG) sharing one replay" in run.output
    for agent_id, algorithm in enumerate(("td3", "sac", "ddpg")):
        assert f"agent {agent_id} ({algorithm.upper()}): evaluation return" in run.output
        records = read_metrics(run.directory.agent(agent_id).metrics.path)
        assert records[-1]["updates"] == 181  # one with each step from the 20th on
        assert {source for record in records for source in record["similarity"]} == {"0", "1", "2"}
        kept = load_checkpoint(latest(run.directory.agent(agent_id).checkpoints))
        assert kept.config.agent.algorithm == algorithm
        assert kept.run_config.algorithms == ("td3", "sac", "ddpg")


RAISES_IN_ONE = """
import os

from worlds import PointGoal


class RaisesInOneProcess(PointGoal):
    steps = 0

    def step(self, action):
        self.steps += 1
        if self.steps == 60:
            self.steps = 0
            break_unless_another_did()
        return super().step(action)


def break_unless_another_did():
    try:
        os.mkdir("broken")
    except FileExistsError:
        return
    raise RuntimeError("the gear is stuck")
"""


def test_an_environment_that_raises_is_shown_with_its_own_traceback(train, tmp_path):
    (tmp_path / "gearbox.py").write_text(RAISES_IN_ONE)
    flags = small_flags("gearbox:RaisesInOneProcess", train__steps=300, env__max_restarts=0)
    run = train("--max-restarts", 0, *flags)
    assert run.end() == 1
    assert re.search(r"error: learner-[01] ended \(exit code 1\); the end of", run.output)
    assert run.output.count("Traceback (most recent call last)") >= 1
    assert "in break_unless_another_did" in run.output
    assert "RuntimeError: the gear is stuck" in run.output
    assert "report: " in run.output
    assert run.nodes() == {}
    kept = [latest(agent.checkpoints) for agent in run.directory.agents()]
    assert "step-000000300" in {path.name for path in kept if path is not None}  # the other one's


def test_nodes_end_by_themselves_when_the_launcher_is_killed(train):
    run = train(*small_flags(train__steps=ENDLESS))
    run.until_training()
    assert set(run.nodes()) == {"replay", "agent=0", "agent=1"}
    run.end(signal.SIGKILL)
    run.until_nobody_is_left()
    assert_kept_until_the_end(run.directory)
    assert "no agent was left" in run.log("replay")  # they sent what was left, and then it ended


HANGS = """
import time

from worlds import PointGoal


class Hangs(PointGoal):
    steps = 0

    def step(self, action):
        self.steps += 1
        if self.steps > 300:
            open("hangs", "w").close()
            time.sleep(600)
        return super().step(action)

    def reset(self, **options):
        return super().reset(**options)
"""


@pytest.mark.long
def test_even_a_learner_whose_environment_hangs_ends_when_the_launcher_is_killed(train, tmp_path):
    (tmp_path / "slow_worlds.py").write_text(HANGS)
    run = train(*small_flags("slow_worlds:Hangs", train__steps=ENDLESS))
    run.until((tmp_path / "hangs").exists)
    run.end(signal.SIGKILL)
    run.until_nobody_is_left()


def test_a_second_signal_kills_all_at_once(train, tmp_path):
    """All that runs, whatever it is about: a learner whose environment hangs would not end by itself."""
    (tmp_path / "slow_worlds.py").write_text(HANGS)
    run = train(*small_flags("slow_worlds:Hangs", train__steps=ENDLESS))
    run.until((tmp_path / "hangs").exists)
    run.process.send_signal(signal.SIGINT)
    run.until(lambda: "stopping" in run.output)
    assert run.end(signal.SIGTERM) == 130
    run.until_nobody_is_left()
    assert not any("the launcher is gone" in run.log(name) for name in ("replay", "learner-0", "learner-1"))
    assert run.output.endswith("killed: the nodes have kept nothing since their last checkpoints\n")


def test_a_run_in_lockstep_is_its_own_and_on_ctrl_c_keeps_everything_and_exits_0(train):
    run = train("--lockstep", *small_flags(train__steps=ENDLESS))
    run.until_training()
    with pytest.raises(RunDirectoryError, match="another process is still writing to"):
        resume_here(ResumeOptions(run.path))
    assert run.end(signal.SIGINT) == 0, run.output
    assert_kept_until_the_end(run.directory)
    assert (run.directory.replay / "buffer.npy").is_file()
    assert "results: " in run.output
