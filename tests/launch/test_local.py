import asyncio
import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from children import lives
from patience import PATIENCE_S
from small import new_run, small_config

from dase_grpc.errors import NodeFailedError
from dase_grpc.launch import local, processes, supervision
from dase_grpc.launch.local import LocalCluster, run_cluster
from dase_grpc.launch.processes import end_nodes, exit_text, start_node
from dase_grpc.replay.wire.v1.cluster_pb2 import AgentStatus, Progress, StatusResponse
from dase_grpc.runs.logs import read_restarts

FAKE = Path(__file__).with_name("fake_node.py")


class NullDisplay:
    """Notes whether it is shown."""

    def __init__(self):
        self.shown = False

    def __enter__(self):
        self.shown = True
        return self

    def __exit__(self, *exc):
        self.shown = False

    def show(self, snapshot):
        raise AssertionError("the fake replay answers nothing")


class Launch:
    """A cluster of fake nodes, and what is left of it."""

    def __init__(self, root: Path, behaviours: dict[str, str], **settings):
        self.pids = root / "pids"
        self.pids.mkdir()
        self.config = small_config(**settings)
        self.directory = new_run(root, self.config)
        self.stop = asyncio.Event()
        self.said: list[str] = []
        self.display = NullDisplay()
        self.program = (sys.executable, "-S", str(FAKE), str(self.pids), json.dumps(behaviours))

    async def run(self, *, gpu=None, **options) -> None:
        await run_cluster(
            self.config,
            self.directory,
            gpu=gpu,
            stop=self.stop,
            display=self.display,
            say=self.say,
            program=self.program,
            **options,
        )

    def say(self, text):
        assert not (self.display.shown and text.startswith("stopping"))
        self.said.append(text)

    def starts(self, name: str) -> list[list[str]]:
        """The arguments of each start of a node."""
        return [json.loads(line) for line in (self.pids / f"{name}.starts").read_text().splitlines()]

    @property
    def restarts(self) -> list[tuple[str, str, float | None]]:
        """What was written down about failures: the node, why, and the pause."""
        return [(each.node, each.why, each.pause_s) for each in read_restarts(self.directory.restarts)]

    def cluster(self, **options) -> LocalCluster:
        return LocalCluster(self.config, self.directory, program=self.program, **options)

    async def until_logged(self, text: str, *names: str) -> None:
        await until(lambda: all(text in self.log(name) for name in names))

    async def until_training(self) -> None:
        await self.until_logged("waiting", "learner-0", "learner-1")
        await until(lambda: self.display.shown)  # a process may run before its start has returned

    def log(self, name: str) -> str:
        with suppress(FileNotFoundError):
            return (self.directory.logs / f"{name}.log").read_text()
        return ""

    def arguments(self, name: str) -> list[str]:
        return json.loads((self.pids / f"{name}.args").read_text())

    @property
    def left(self) -> list[str]:
        return [path.stem for path in self.pids.glob("*.pid") if is_running(int(path.read_text()))]


async def until(condition):
    """Returns once another process has made the condition true."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - another process sets no Event
            await asyncio.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(local, "STATUS_S", 0.05)
    monkeypatch.setattr(supervision, "FIRST_PAUSE_S", 0.01)


@pytest.fixture
def launch(tmp_path):
    return lambda replay="serve", first="end", second="end", **settings: Launch(
        tmp_path, {"replay": replay, "learner-0": first, "learner-1": second}, **settings
    )


# -- a good run ---------------------------------------------------------------------------------------


async def test_a_run_ends_when_all_learners_have_ended_and_nobody_is_left(launch):
    cluster = launch()
    await cluster.run()
    assert cluster.left == []
    assert "told to end" not in cluster.log("learner-0")
    assert cluster.said == []


async def test_nodes_are_told_what_the_configuration_says(launch):
    cluster = launch(train__seed=3, train__threads=2, replay__capacity="1MiB", metrics__port=9_000)
    await cluster.run(gpu=1)
    path = cluster.directory.path
    assert cluster.arguments("replay") == [
        "node",
        "--stdin-is-leash",
        "--role=replay",
        "--listen=127.0.0.1:0",
        "--capacity=1MiB",
        "--min-size=20",
        "--seed=3",
        "--run-id=run",
        "--metrics-port=9000",
        f"--data-dir={path / 'replay'}",
        "OMP=2",
    ]
    assert cluster.arguments("learner-1") == [
        "node",
        "--stdin-is-leash",
        "--role=learner",
        "--replay=127.0.0.1:1",
        "--agent=1",
        f"--config={path / 'run.toml'}",
        f"--run-dir={path}",
        "--metrics-port=9002",
        "--gpu=1",
        "OMP=2",
    ]


async def test_a_metrics_port_of_zero_is_off_for_all(launch):
    cluster = launch()
    await cluster.run()
    assert "--metrics-port=0" in cluster.arguments("replay")
    assert "--metrics-port=0" in cluster.arguments("learner-1")


async def test_an_environment_that_prints_a_lot_blocks_nobody_and_lands_in_the_log(launch):
    cluster = launch(first="flood")
    await cluster.run()
    assert len(cluster.log("learner-0")) > 1_000_000


# -- failures -----------------------------------------------------------------------------------------


async def test_a_learner_that_is_killed_is_started_again_from_its_checkpoint_while_the_other_goes_on(launch):
    cluster = launch(first="be killed, be killed, end", second="train, end")
    running = asyncio.create_task(cluster.run())
    await until(lambda: len(cluster.said) == 2)
    await cluster.until_logged("waiting", "learner-1")
    os.kill(int((cluster.pids / "learner-1.pid").read_text()), signal.SIGKILL)
    await running
    assert cluster.restarts == [
        ("learner-0", "killed by SIGKILL", 0.01),
        ("learner-0", "killed by SIGKILL", 0.02),
        ("learner-1", "killed by SIGKILL", 0.01),
    ]
    first, *later = cluster.starts("learner-0")
    assert "--resume" not in first
    assert all([*first[:-1], "--resume", first[-1]] == each for each in later)
    assert len(cluster.starts("replay")) == 1
    log = cluster.directory.logs / "learner-0.log"
    assert cluster.said[0] == (
        "learner-0 ended (killed by SIGKILL); it is started again in 0.01 s (restart 1 of 5); "
        f"its log is {log}"
    )
    assert cluster.left == []


async def test_what_a_node_has_started_does_not_outlive_it(launch):
    cluster = launch(first="leave a simulator and be killed, train", second="leave a simulator")
    running = asyncio.create_task(cluster.run())
    await cluster.until_logged("waiting", "learner-0")
    await until(lambda: len(list(cluster.pids.glob("*.simulator"))) == 2)  # of a learner each, in any order
    simulators = [int(path.stem) for path in cluster.pids.glob("*.simulator")]
    await until(lambda: not any(map(lives, simulators)))
    assert not running.done()
    cluster.stop.set()
    await running


async def test_a_replay_that_is_killed_is_started_again_at_its_address_and_the_learners_go_on(launch):
    cluster = launch(replay="serve until the others train, serve", first="train", second="train")
    running = asyncio.create_task(cluster.run())
    await until(lambda: cluster.log("replay") == "" and len(cluster.said) == 1)
    await until(lambda: len(cluster.starts("replay")) == 2)
    first, second = cluster.starts("replay")
    assert "--listen=127.0.0.1:0" in first
    assert second == ["--listen=127.0.0.1:1" if each == "--listen=127.0.0.1:0" else each for each in first]
    assert len(cluster.starts("learner-0")) == len(cluster.starts("learner-1")) == 1
    cluster.stop.set()
    await running
    assert cluster.restarts == [("replay", "killed by SIGKILL", 0.01)]
    assert cluster.left == []


async def test_a_learner_that_fails_again_and_again_is_given_up_and_the_other_trains_to_its_end(launch):
    cluster = launch(first="train, end", second="raise")
    running = asyncio.create_task(cluster.run(max_restarts=2))
    await until(lambda: len(cluster.said) == 3)
    assert not running.done()
    assert "told to end" not in cluster.log("learner-0")
    os.kill(int((cluster.pids / "learner-0.pid").read_text()), signal.SIGKILL)  # and then ends
    with pytest.raises(NodeFailedError) as caught:
        await running
    text = str(caught.value)
    assert text.startswith("learner-1 ended again after 2 restarts and is given up (exit code 1); the end of")
    assert text.endswith("RuntimeError: the simulator broke")
    why = "exit code 1, RuntimeError: the simulator broke"
    *failures, last = cluster.restarts
    assert failures == [("learner-1", why, 0.01), ("learner-1", why, 0.02), ("learner-1", why, None)]
    assert last == ("learner-0", "killed by SIGKILL", 0.01)
    assert cluster.log("learner-1").count("Traceback") == 3
    assert cluster.said[2].startswith(f"learner-1 is given up ({why}); its log is")
    assert cluster.left == []


async def test_a_learner_that_ends_well_before_its_last_step_has_failed_at_once(launch):
    cluster = launch(first="end early, train, end", second="train, end")
    running = asyncio.create_task(cluster.run())
    await cluster.until_logged("waiting", "learner-0", "learner-1")
    assert "--resume" in cluster.starts("learner-0")[-1]
    assert cluster.said[0].startswith(
        "learner-0 ended (exit code 0, before its last step); it is started again in 0.01 s (restart 1 of 5)"
    )
    for name in ("learner-0", "learner-1"):  # as somebody might who means to stop only one
        os.kill(int((cluster.pids / f"{name}.pid").read_text()), signal.SIGTERM)
    await running
    why = "exit code 0, before its last step"
    assert sorted(cluster.restarts) == [
        ("learner-0", why, 0.01),
        ("learner-0", why, 0.02),
        ("learner-1", why, 0.01),
    ]
    assert cluster.left == []


async def test_a_learner_that_ends_early_again_and_again_is_given_up_with_a_hint(launch):
    cluster = launch(first="end early", second="end")
    with pytest.raises(NodeFailedError) as caught:
        await cluster.run(max_restarts=1)
    assert str(caught.value).startswith(
        "learner-0 ended before its last step although nothing failed "
        "(does the environment end the process?), again after 1 restart, and is given up (exit code 0); "
    )


async def test_a_learner_that_gets_on_between_its_failures_is_given_up_too_in_the_end(launch, monkeypatch):
    monkeypatch.setattr(supervision, "IN_ALL", 3)
    cluster = launch(first="fail a checkpoint later each time", second="end")
    with pytest.raises(NodeFailedError, match="learner-0 ended again after 6 restarts and is given up"):
        await cluster.run(max_restarts=2)
    failures = read_restarts(cluster.directory.restarts)
    assert [each.from_step for each in failures] == [1, 2, 3, 4, 5, 6, 7]
    assert [each.pause_s for each in failures] == [0.01] * 6 + [None]


async def test_without_restarts_a_learner_that_is_killed_is_named_at_the_end(launch):
    cluster = launch(first="be killed", second="end")
    with pytest.raises(NodeFailedError, match=r"learner-0 ended \(killed by SIGKILL\).*\n\(empty\)"):
        await cluster.run(max_restarts=0)
    assert cluster.left == []


async def test_learners_that_are_all_given_up_are_reported_as_one(launch):
    cluster = launch(first="raise", second="raise")
    with pytest.raises(NodeFailedError, match=r"learner-[01] ended"):
        await cluster.run(max_restarts=1)
    assert cluster.left == []


@pytest.mark.parametrize(
    ("behaviour", "code", "own"), [("refuse", 2, 1), ("be fenced off", 3, 1), ("find the disk full", 4, 4)]
)
async def test_a_learner_that_no_restart_would_mend_ends_the_run_at_once(launch, behaviour, code, own):
    cluster = launch(first="train", second=behaviour)
    with pytest.raises(NodeFailedError, match=rf"learner-1 ended \(exit code {code}\)") as raised:
        await cluster.run()
    assert raised.value.exit_code == own
    assert cluster.restarts == []
    assert cluster.left == []


@pytest.mark.slow
async def test_a_replay_that_is_given_up_ends_the_learners(launch):
    cluster = launch(replay="serve briefly", first="train", second="train")
    with pytest.raises(NodeFailedError, match=r"replay ended again after 1 restart and is given up \(exit"):
        await cluster.run(max_restarts=1)
    assert [pause for _, _, pause in cluster.restarts] == [0.01, None]
    assert cluster.left == []


@pytest.mark.slow
async def test_a_replay_that_does_not_answer_when_it_is_started_again_counts_as_failed(launch, monkeypatch):
    cluster = launch(replay="serve briefly, import slowly, say nonsense", first="train", second="train")
    with pytest.raises(NodeFailedError, match="replay ended again after 2 restarts and is given up"):
        await cluster.run(max_restarts=2, on_start=lambda _: monkeypatch.setattr(local, "READY_S", 0.5))
    assert len(cluster.starts("replay")) == 3
    assert cluster.left == []


@pytest.mark.slow
async def test_a_replay_whose_restart_is_refused_is_tried_again_as_its_port_may_be_free_later(launch):
    cluster = launch(replay="serve briefly, refuse, refuse, serve", first="train", second="train")
    running = asyncio.create_task(cluster.run())
    await until(lambda: len(cluster.said) == 3 or running.done())
    await until(lambda: len(cluster.starts("replay")) == 4 or running.done())
    cluster.stop.set()
    await running
    assert [why[:11] for _, why, _ in cluster.restarts] == ["exit code 1", "exit code 2", "exit code 2"]
    assert len(cluster.starts("learner-0")) == len(cluster.starts("learner-1")) == 1
    assert cluster.left == []


async def test_a_replay_whose_restarts_are_all_refused_ends_the_run(launch):
    cluster = launch(replay="serve briefly, refuse", first="train", second="train")
    with pytest.raises(
        NodeFailedError, match=r"replay ended again after 2 restarts and is given up \(exit code 2"
    ):
        await cluster.run(max_restarts=2)
    assert cluster.left == []


async def test_a_replay_that_has_answered_and_then_says_that_it_cannot_go_on_ends_the_run(launch):
    cluster = launch(replay="serve until the disk is full", first="train", second="train")
    with pytest.raises(NodeFailedError, match=r"replay ended while learners were training \(exit code 2\)"):
        await cluster.run()
    assert len(cluster.starts("replay")) == 1
    assert cluster.left == []


async def test_a_replay_that_fails_before_it_has_answered_is_started_again_too(launch):
    cluster = launch(replay="be killed, raise, serve")
    await cluster.run()
    assert cluster.restarts == [
        ("replay", "killed by SIGKILL", 0.01),
        ("replay", "exit code 1, RuntimeError: the simulator broke", 0.02),
    ]
    assert len(cluster.starts("learner-0")) == len(cluster.starts("learner-1")) == 1
    assert cluster.left == []


async def test_a_replay_that_always_fails_before_it_answers_ends_the_run_and_no_learner_is_started(launch):
    cluster = launch(replay="be killed")
    with pytest.raises(NodeFailedError, match=r"replay could not start \(killed by SIGKILL\)"):
        await cluster.run(max_restarts=2)
    assert [pause for _, _, pause in cluster.restarts] == [0.01, 0.02, None]
    assert not (cluster.pids / "learner-0.pid").exists()
    assert cluster.left == []


async def test_a_learner_whose_restart_is_refused_is_tried_again_as_its_port_may_be_free_later(launch):
    cluster = launch(first="be killed, refuse, refuse, end")
    await cluster.run()
    assert [why[:11] for _, why, _ in cluster.restarts] == ["killed by S", "exit code 2", "exit code 2"]
    assert cluster.left == []


async def test_a_learner_whose_restarts_are_all_refused_is_given_up_and_the_other_trains_to_its_end(launch):
    cluster = launch(first="be killed, refuse", second="end")
    with pytest.raises(
        NodeFailedError, match=r"learner-0 ended again after 2 restarts and is given up \(exit code 2"
    ):
        await cluster.run(max_restarts=2)
    assert "told to end" not in cluster.log("learner-1")
    assert cluster.left == []


@pytest.mark.slow
async def test_a_replay_that_lives_and_does_not_answer_is_killed_and_started_again(launch, monkeypatch):
    monkeypatch.setattr(supervision, "SILENT_S", 1.5)
    monkeypatch.setattr(local, "POLL_S", 0.05)
    cluster = launch(replay="serve", first="train", second="train")
    running = asyncio.create_task(cluster.run())
    await until(lambda: len(cluster.starts("replay")) == 2 if cluster.said else False)
    cluster.stop.set()
    await running
    assert cluster.restarts[0] == ("replay", "killed, for it was not heard of for 1.5 s", 0.01)
    assert len(cluster.starts("learner-0")) == len(cluster.starts("learner-1")) == 1
    assert cluster.left == []


class FirstOneSilent:
    """Stands for a replay's client: agent 0 has sent a heartbeat once, agent 1 always does."""

    def __init__(self, *_):
        self.answers = 0

    async def status(self, *, timeout_s):
        self.answers += 1
        return StatusResponse(
            agents=[
                AgentStatus(
                    agent_id=agent_id,
                    lease="expired" if agent_id == 0 and self.answers > 1 else "live",
                    progress=Progress(state="training"),
                )
                for agent_id in (0, 1)
            ]
        )


class Screen(NullDisplay):
    """Shows anything."""

    def show(self, snapshot):
        pass


@pytest.mark.slow
async def test_a_learner_that_lives_without_a_lease_is_killed_and_started_again(launch, monkeypatch):
    monkeypatch.setattr(supervision, "SILENT_S", 1.5)
    monkeypatch.setattr(local, "POLL_S", 0.02)
    monkeypatch.setattr(local, "ClusterClient", FirstOneSilent)
    cluster = launch(first="ignore SIGTERM, end", second="train", env__timeout_s=0.1)
    cluster.display = Screen()
    running = asyncio.create_task(cluster.run())
    await until(lambda: len(cluster.starts("learner-0")) == 2 if cluster.said else False)
    cluster.stop.set()
    await running
    assert cluster.restarts == [("learner-0", "killed, for it was not heard of for 1.5 s", 0.01)]
    assert cluster.said[0].startswith(
        "learner-0 ended (killed, for it was not heard of for 1.5 s); it is started again in 0.01 s"
    )
    assert "--resume" in cluster.starts("learner-0")[1]
    assert len(cluster.starts("learner-1")) == 1
    assert cluster.left == []


async def test_stop_while_the_replay_waits_for_its_restart_is_a_good_end(launch, monkeypatch):
    monkeypatch.setattr(supervision, "FIRST_PAUSE_S", 600.0)
    cluster = launch(replay="serve until the others train, serve", first="train", second="train")
    running = asyncio.create_task(cluster.run())
    await until(lambda: len(cluster.said) == 1)
    cluster.stop.set()
    await running
    assert len(cluster.starts("replay")) == 1
    assert cluster.left == []


async def test_stop_while_a_learner_waits_for_its_restart_is_a_good_end(launch, monkeypatch):
    monkeypatch.setattr(supervision, "FIRST_PAUSE_S", 600.0)
    cluster = launch(first="be killed", second="train")
    running = asyncio.create_task(cluster.run())
    await until(lambda: len(cluster.said) == 1)
    cluster.stop.set()
    await running
    assert len(cluster.starts("learner-0")) == 1
    assert cluster.left == []


async def test_killing_a_cluster_leaves_nobody(launch):
    cluster = launch(first="ignore SIGTERM", second="train")
    opened = []
    running = asyncio.create_task(cluster.run(on_open=opened.append, max_restarts=0))
    await cluster.until_training()
    opened[0].kill()
    with pytest.raises(NodeFailedError, match="killed by SIGKILL"):
        await running
    assert cluster.left == []


async def test_a_replay_that_cannot_start_is_named_with_its_exit_code_and_no_learner_is_started(launch):
    cluster = launch(replay="refuse")
    with pytest.raises(NodeFailedError, match=r"replay could not start \(exit code 2\)"):
        await cluster.run()
    assert not (cluster.pids / "learner-0.pid").exists()
    assert cluster.left == []


@pytest.mark.slow
async def test_a_replay_that_says_something_else_than_its_address_is_ended(launch):
    cluster = launch(replay="say nonsense")
    with pytest.raises(NodeFailedError, match="replay said 'good morning' instead of its address"):
        await cluster.run()
    assert cluster.left == []


@pytest.mark.slow
async def test_a_replay_that_stays_silent_is_ended(launch, monkeypatch):
    monkeypatch.setattr(local, "READY_S", 0.5)
    cluster = launch(replay="import slowly")
    with pytest.raises(NodeFailedError, match=r"replay did not answer within 0\.5 s"):
        await cluster.run(max_restarts=1)
    assert [why for _, why, _ in cluster.restarts] == ["killed, for it did not answer"] * 2
    assert cluster.left == []


async def test_a_program_that_is_not_there_leaves_nothing_behind(launch):
    cluster = launch()
    cluster.program = ("/no/such/program",)
    with pytest.raises(FileNotFoundError, match="/no/such/program"):
        await cluster.run()


async def test_a_display_that_fails_ends_the_nodes(launch):
    cluster = launch(first="train", second="train")

    def broken():
        raise ValueError("no such terminal")

    cluster.display.__class__ = type("Broken", (NullDisplay,), {"__enter__": lambda self: broken()})
    with pytest.raises(ValueError, match="no such terminal"):
        await cluster.run()
    assert cluster.left == []


# -- stopping -----------------------------------------------------------------------------------------


async def test_stop_lets_the_learners_drain_before_the_replay_goes(launch):
    cluster = launch(first="train", second="train")
    running = asyncio.create_task(cluster.run())
    await cluster.until_training()
    cluster.stop.set()
    await running
    assert cluster.left == []
    assert "told to end" in cluster.log("learner-0")
    assert "told to end" in cluster.log("learner-1")
    (sentence,) = cluster.said
    assert sentence.startswith("stopping: ")


async def test_stop_before_the_replay_answers_ends_it(launch):
    cluster = launch(replay="import slowly")
    running = asyncio.create_task(cluster.run())
    await until((cluster.pids / "replay.pid").exists)
    cluster.stop.set()
    await running
    assert cluster.left == []


async def test_stop_before_anything_has_started_starts_nothing_that_stays(launch):
    cluster = launch()
    cluster.stop.set()
    await cluster.run()
    assert cluster.left == []


async def test_stop_while_learners_are_still_importing_is_a_good_end(launch):
    cluster = launch(first="import slowly", second="import slowly")
    running = asyncio.create_task(cluster.run())
    await until(lambda: len(list(cluster.pids.glob("learner-*.pid"))) == 2)
    cluster.stop.set()
    await running
    assert cluster.left == []


async def test_a_learner_that_fails_to_drain_makes_the_stop_a_failure(launch, monkeypatch):
    cluster = launch(first="ignore SIGTERM", second="train")
    monkeypatch.setattr(processes.end_nodes, "__kwdefaults__", {"within_s": 0.2})
    running = asyncio.create_task(cluster.run())
    await cluster.until_training()
    cluster.stop.set()
    with pytest.raises(NodeFailedError, match=r"learner-0 ended \(killed by SIGKILL\)"):
        await running
    assert cluster.left == []


async def test_cancelling_kills_what_does_not_end_at_once(launch):
    cluster = launch(first="ignore SIGTERM", second="train")
    running = asyncio.create_task(cluster.run())
    await cluster.until_training()
    running.cancel()
    await cluster.until_logged("told to end", "learner-1")
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert cluster.left == []


async def test_waiting_may_be_cancelled_and_taken_up_again(launch):
    cluster = launch(first="train", second="train")
    async with cluster.cluster() as running:
        await running.start()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await running.wait()
        await running.stop_learners()
        await running.wait()
    assert cluster.left == []


# -- processes ----------------------------------------------------------------------------------------


async def test_killing_a_node_kills_what_it_has_started(tmp_path):
    script = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid, flush=True); input()"
    command = (sys.executable, "-c", f"import signal; signal.signal(15, lambda *_: 0); {script}")
    node = await start_node("node", command, log=tmp_path / "node.log", threads=1, read_stdout=True)
    assert node.process.stdout is not None
    child = int(await node.process.stdout.readline())
    await end_nodes([node], within_s=0.1)
    assert node.process.returncode == -9
    await until(lambda: not lives(child))


async def test_ending_a_node_that_has_ended_kills_what_it_has_left_behind(tmp_path):
    script = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid, flush=True)"
    node = await start_node("node", (sys.executable, "-c", script), log=tmp_path / "node.log", threads=1)
    await node.process.wait()
    child = int(node.log.read_text())
    assert lives(child)
    await end_nodes([node])
    assert node.process.returncode == 0
    await until(lambda: not lives(child))


async def test_ending_nodes_that_have_ended_does_nothing(tmp_path):
    node = await start_node("node", (sys.executable, "-c", ""), log=tmp_path / "node.log", threads=1)
    await node.process.wait()
    await end_nodes([node])
    await end_nodes([])


async def test_a_failure_shows_the_end_of_a_long_log_even_if_it_is_no_text(tmp_path):
    log = tmp_path / "node.log"
    command = (sys.executable, "-c", "import os; os.write(2, b'line\\n' * 1000 + b'\\xff last')")
    node = await start_node("node", command, log=log, threads=1)
    await node.process.wait()
    text = str(node.failure("ended"))
    assert text.startswith(f"node ended (exit code 0); the end of {log}:\n")
    assert len(text.splitlines()) == 1 + processes.SHOWN_LOG_LINES
    assert text.endswith("\ufffd last")


async def test_of_a_log_however_long_only_the_end_is_read(tmp_path):
    log = tmp_path / "node.log"
    node = await start_node("node", (sys.executable, "-c", ""), log=log, threads=1)
    await node.ended()
    with log.open("wb") as file:
        file.truncate(2**40)  # takes no room on the disk
        file.seek(0, os.SEEK_END)
        file.write(b"\nlast")
    assert str(node.failure("ended")).endswith("\nlast")


@pytest.mark.parametrize(
    ("code", "text"),
    [(0, "exit code 0"), (2, "exit code 2"), (-9, "killed by SIGKILL"), (-63, "killed by signal 63")],
)
def test_the_end_of_a_process_is_told_in_words(code, text):
    assert exit_text(code) == text


# -- actors -------------------------------------------------------------------------------------------

EXPLORE = "explore until all is learned"


@pytest.fixture
def with_actors(tmp_path):
    def make(actor=EXPLORE, other=EXPLORE, learner="end", **settings):
        behaviours = {"replay": "serve", "learner-0": learner, "actor-0-0": actor, "actor-0-1": other}
        changes = {"train__agents": 1, "train__actors": 2, "train__explore": False, **settings}
        return Launch(tmp_path, behaviours, **changes)

    return make


async def test_actors_are_told_whose_they_are_and_end_after_their_learner(with_actors):
    cluster = with_actors(metrics__port=9_000)
    await cluster.run()
    address = cluster.arguments("learner-0")[3]
    for index in (0, 1):
        assert cluster.arguments(f"actor-0-{index}") == [
            "node",
            "--stdin-is-leash",
            "--role=actor",
            address,
            "--agent=0",
            f"--config={cluster.directory.path}/run.toml",
            f"--metrics-port={9_002 + index}",
            "OMP=1",
        ]
        assert "has finished" in cluster.log(f"actor-0-{index}")
    assert (cluster.left, cluster.said) == ([], [])


async def test_an_actor_that_is_killed_is_started_again(with_actors):
    cluster = with_actors(actor=f"be killed, {EXPLORE}")
    await cluster.run()
    assert [node for node, _, _ in cluster.restarts] == ["actor-0-0"]
    assert len(cluster.starts("actor-0-0")) == 2
    assert cluster.left == []


async def test_an_actor_whose_settings_are_refused_ends_the_run(with_actors):
    cluster = with_actors(actor="refuse", learner="train")
    with pytest.raises(NodeFailedError, match="actor-0-0 ended"):
        await cluster.run()
    assert cluster.left == []


async def test_actors_that_stay_when_their_learner_has_ended_are_ended(with_actors, monkeypatch):
    monkeypatch.setattr(local, "ACTORS_END_S", 0.1)
    cluster = with_actors(actor="train", other="train")
    await cluster.run()
    assert "told to end" in cluster.log("actor-0-0")
    assert cluster.left == []


async def test_on_a_signal_actors_end_before_their_learner(with_actors):
    cluster = with_actors(actor="train", other="train", learner="train")
    running = asyncio.ensure_future(cluster.run())
    await cluster.until_logged("waiting", "learner-0", "actor-0-0", "actor-0-1")
    await until(lambda: cluster.display.shown)
    cluster.stop.set()
    await running
    ends = [
        (cluster.directory.logs / f"{name}.log").stat().st_mtime_ns for name in ("actor-0-1", "learner-0")
    ]
    assert ends == sorted(ends)
    assert cluster.left == []
