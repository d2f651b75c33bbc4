"""Real processes: actors of a learner that does not explore are killed, stopped, started; counts agree."""

import asyncio
import re
import signal

import pytest
from faults.stories import EPISODE, check_rollouts
from nodes.learning_cases import status_of
from nodes.processes import learner_arguments, process, replay_process
from patience import PATIENCE_S

from dase_grpc.replay.wire.addresses import parse_address
from dase_grpc.runs.checkpoint import latest, load_checkpoint

STEPS, AHEAD, FIRST = 3_000, 100, 20
pytestmark = [pytest.mark.slow, pytest.mark.faults]


async def until_exploring(address, *, actors, task=None):
    """Waits until so many actors say that they have explored for a while."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            steps = [node.attendance.env_steps for node in (await status_of(address)).nodes]
            if sum(each > 2 * EPISODE for each in steps) >= actors:
                return
            await asyncio.sleep(0.02)


async def test_one_actor_is_killed_and_one_stopped_in_a_rollout_and_the_learner_finishes_with_a_third(
    storm, tmp_path
):
    data, run = tmp_path / "data", tmp_path / "run"
    with replay_process(f"--data-dir={data}") as (replay, text):
        address = parse_address(text)
        learner = learner_arguments(
            text, run, train__explore="false", train__step_error_buffer=AHEAD, train__steps=STEPS
        )
        told = [each for each in learner if each.startswith(("--rep", "--set"))]
        actor = ["--role=actor", "--agent=0", *told]
        with process(*learner) as training:
            with process(*actor) as killed, process(*actor) as stopped:
                await until_exploring(address, actors=2)
                killed.send(signal.SIGKILL)
                stopped.send(signal.SIGTERM)
                assert await asyncio.to_thread(stopped.exit_code) == 0, stopped.log
                assert await asyncio.to_thread(killed.exit_code) == -signal.SIGKILL
            assert training.popen.poll() is None, "the run was over before an actor was missing"
            with process(*actor) as third:
                assert await asyncio.to_thread(training.exit_code) == 0, training.log
                assert await asyncio.to_thread(third.exit_code) == 0, third.log
        inserted = (await status_of(address)).buffer.inserted_by_agent[0]
        replay.send(signal.SIGTERM)
        assert replay.exit_code() == 0
    assert "agent 0 has finished, so this actor ends" in third.log
    for node in (training, stopped, third, replay):
        assert "Traceback" not in node.log
    files = storm.read_files(data)
    written = [number for (agent, name), number in files.sequences.items() if name.startswith("actor-")]
    assert len(written) == len(files.sequences) == 3
    told = re.search(r"stopped after (\d+) environment steps", stopped.log)
    assert told is not None
    assert int(told[1]) in written
    check_rollouts(files.rows, written)
    checkpoint = load_checkpoint(latest(run / "agents/0/checkpoints"))
    assert STEPS == checkpoint.step == checkpoint.training["counters"]["used"] + FIRST - 1
    assert STEPS <= sum(written) == inserted == files.total <= STEPS + AHEAD
