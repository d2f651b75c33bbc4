"""`dase train` as a person runs it: real processes, real gRPC, and every way in which it can end."""

import fcntl
import os
import pty
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from children import importing, until_ended
from patience import PATIENCE_S
from small import small_flags

from dase_grpc.runs.checkpoint import latest, load_checkpoint
from dase_grpc.runs.directory import AgentDirectory, RunDirectory, checkpoint_path
from dase_grpc.runs.logs import read_evaluations, read_metrics, read_restarts

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parents[1]
ENDLESS = 10_000_000


class Train:
    """A `dase train` process in a folder of its own, named after that folder."""

    def __init__(self, folder: Path, *arguments: object, stdout: int | None = None) -> None:
        self.folder = folder
        self.name = f"{folder.parent.name}-{folder.name}"
        self.output_file = folder / "output.txt"
        command = [sys.executable, "-m", "dase_grpc", "train", "--name", self.name, *map(str, arguments)]
        with self.output_file.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output if stdout is None else stdout,
                stderr=output if stdout is None else stdout,
                env=importing(TESTS, TERM="xterm"),
            )

    @property
    def directory(self) -> RunDirectory:
        return RunDirectory.open(self.folder / "runs" / self.name)

    @property
    def output(self) -> str:
        return self.output_file.read_text()

    def agent(self, agent_id: int) -> AgentDirectory:
        return AgentDirectory(self.folder / "runs" / self.name / "agents" / str(agent_id))

    def updates(self, agent_id: int) -> int:
        """How many updates the agent has told of."""
        return int(read_metrics(self.agent(agent_id).metrics.path)[-1]["updates"])

    def log(self, name: str) -> str:
        return (self.directory.logs / f"{name}.log").read_text()

    def nodes(self) -> dict[str, int]:
        """The pids of this run's nodes that live, by role or agent; launched by us or left behind."""
        found = {}
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                command = path.read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            if "node" in command and any(self.name in part for part in command):
                role = next(part for part in command if part.startswith(("--agent=", "--role=replay")))
                found[role.removeprefix("--role=").removeprefix("--")] = int(path.parent.name)
        return found

    def until_training(self) -> None:
        """Returns once both agents have trained for a while."""
        self.until(lambda: all(len(self.curve(agent_id).step) >= 3 for agent_id in (0, 1)))

    def until(self, condition: Callable[[], bool]) -> None:
        limit = time.monotonic() + PATIENCE_S
        while not condition():
            assert self.process.poll() is None, self.output
            assert time.monotonic() < limit, self.output
            time.sleep(0.05)

    def curve(self, agent_id: int):
        path = self.folder / "runs" / self.name / "agents" / str(agent_id) / "evaluations.csv"
        return read_evaluations(path)

    def end(self) -> int:
        return self.process.wait(PATIENCE_S)


@pytest.fixture
def train(tmp_path) -> Iterator[Callable[..., Train]]:
    started = []

    def start(*arguments: object, **options) -> Train:
        started.append(Train(tmp_path, *arguments, **options))
        return started[-1]

    yield start
    for each in started:
        if each.process.poll() is None:
            each.process.kill()
            each.process.wait()
        for pid in each.nodes().values():
            os.kill(pid, signal.SIGKILL)


def until_nobody_is_left(run: Train) -> None:
    while left := run.nodes().values():
        until_ended(*left)


def assert_kept_until_the_end(run: Train) -> None:
    """Both agents have a checkpoint that can be read, of the step that their last record names."""
    for agent in run.directory.agents():
        path = latest(agent.checkpoints)
        assert path is not None
        assert load_checkpoint(path).step == read_metrics(agent.metrics.path)[-1]["step"]


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
    assert_kept_until_the_end(run)
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


def test_a_killed_learner_and_a_killed_replay_are_started_again_and_the_run_reaches_its_end(train):
    run = train(*small_flags(train__steps=1_500, train__checkpoint_every=100, eval__every=400))
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
    assert "started again once (killed by SIGKILL)" in run.directory.report.read_text()


@pytest.mark.long
def test_a_replay_in_memory_that_is_killed_is_started_again_and_its_learners_join_it_anew(train):
    run = train(*small_flags(train__steps=ENDLESS, replay__storage="memory"))
    run.until_training()
    assert "buffer in memory: it ends with the replay's process" in run.output
    assert not run.directory.replay.exists()
    os.kill(run.nodes()["replay"], signal.SIGKILL)
    run.until(lambda: all("came back without its data" in run.log(f"learner-{each}") for each in (0, 1)))
    steps = [read_metrics(run.agent(each).metrics.path)[-1]["updates"] for each in (0, 1)]
    run.until(lambda: all(run.updates(each) > steps[each] + 100 for each in (0, 1)))
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 0, run.output
    assert run.nodes() == {}


@pytest.mark.parametrize(
    "mode",
    [pytest.param((), id="cluster", marks=pytest.mark.long), pytest.param(("--lockstep",), id="lockstep")],
)
def test_a_pair_that_distils_trains_to_the_end_and_is_reported_as_such(train, mode):
    # no batch before both have stored their 20 random steps, so neither can be done before the other comes
    together = {"replay__min_size": 40}
    flags = small_flags(train__steps=1_500, dpd__publish_every=20, eval__every=500, **together)
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


@pytest.mark.parametrize(
    "mode",
    [pytest.param((), id="cluster", marks=pytest.mark.long), pytest.param(("--lockstep",), id="lockstep")],
)
def test_agents_of_different_algorithms_share_one_buffer(train, mode):
    # no batch before all have stored their 20 random steps, so none can be done before the others come
    together = {} if mode else {"replay__min_size": 60}
    flags = small_flags(train__agents=3, train__steps=300, **together)
    run = train("--algo", "td3,sac,ddpg", *mode, *flags)
    assert run.end() == 0, run.output
    assert "3 agents (TD3, SAC, DDPG) sharing one replay" in run.output
    for agent_id, algorithm in enumerate(("td3", "sac", "ddpg")):
        assert f"agent {agent_id} ({algorithm.upper()}): evaluation return" in run.output
        records = read_metrics(run.directory.agent(agent_id).metrics.path)
        assert records[-1]["updates"] == 281  # one with each step from the 20th on
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
    run = train(
        "--max-restarts", 0, *small_flags("gearbox:RaisesInOneProcess", train__steps=500, env__max_restarts=0)
    )
    assert run.end() == 1
    assert re.search(r"error: learner-[01] ended \(exit code 1\); the end of", run.output)
    assert run.output.count("Traceback (most recent call last)") >= 1
    assert "in break_unless_another_did" in run.output
    assert "RuntimeError: the gear is stuck" in run.output
    assert "report: " in run.output
    assert run.nodes() == {}
    kept = [latest(agent.checkpoints) for agent in run.directory.agents()]
    assert "step-000000500" in {path.name for path in kept if path is not None}  # the other one's


@pytest.mark.long
def test_an_environment_that_raises_once_costs_a_restart(train, tmp_path):
    (tmp_path / "gearbox.py").write_text(RAISES_IN_ONE)
    run = train(*small_flags("gearbox:RaisesInOneProcess", train__steps=500, env__max_restarts=0))
    assert run.end() == 0, run.output
    why = r"exit code 1, [^\n]*RuntimeError: the gear is stuck[^\n]*"
    assert re.search(rf"note: learner-[01] was started again once \({why}\); its log is", run.output)


def test_nodes_end_by_themselves_when_the_launcher_is_killed(train):
    run = train(*small_flags(train__steps=ENDLESS))
    run.until_training()
    assert set(run.nodes()) == {"replay", "agent=0", "agent=1"}
    run.process.kill()
    run.process.wait()
    until_nobody_is_left(run)
    assert_kept_until_the_end(run)
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
    run.process.kill()
    run.process.wait()
    until_nobody_is_left(run)


def test_a_second_signal_kills_all_at_once(train, tmp_path):
    """All that runs, whatever it is about: a learner whose environment hangs would not end by itself."""
    (tmp_path / "slow_worlds.py").write_text(HANGS)
    run = train(*small_flags("slow_worlds:Hangs", train__steps=ENDLESS))
    run.until((tmp_path / "hangs").exists)
    run.process.send_signal(signal.SIGINT)
    run.until(lambda: "stopping" in run.output)
    run.process.send_signal(signal.SIGTERM)
    assert run.end() == 130
    until_nobody_is_left(run)
    assert not any("the launcher is gone" in run.log(name) for name in ("replay", "learner-0", "learner-1"))
    assert run.output.endswith("killed: the nodes have kept nothing since their last checkpoints\n")


def test_ctrl_c_in_lockstep_keeps_everything_and_exits_0(train):
    run = train("--lockstep", *small_flags(train__steps=ENDLESS))
    run.until_training()
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 0, run.output
    assert_kept_until_the_end(run)
    assert (run.directory.replay / "buffer.npy").is_file()
    assert "results: " in run.output
