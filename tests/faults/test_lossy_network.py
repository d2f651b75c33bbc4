"""A learner on another host, behind a network that loses, delays and stops packets."""

import asyncio
import os
import signal
from contextlib import contextmanager

import pytest
from faults.lossy import NoNamespaces, second_host
from faults.stories import check_story, trained_on
from nodes.learning_cases import checkpoint_step, status_of
from nodes.processes import learner_arguments, process
from nodes.running import replay_node
from patience import PATIENCE_S

from dase_grpc.replay.wire.addresses import Address

PARTITION_S = float(os.environ.get("DASE_PARTITION", "2"))

pytestmark = [pytest.mark.slow, pytest.mark.faults, pytest.mark.timeout(3 * (PATIENCE_S + PARTITION_S))]


@contextmanager
def host():
    """The second host; where there can be none, the test is skipped with the reason."""
    try:
        with second_host(seed=3) as made:
            yield made
    except NoNamespaces as reason:
        pytest.skip(str(reason))


async def test_a_learner_behind_loss_delay_and_a_partition_stores_each_step_once(storm, tmp_path):
    data = tmp_path / "data"
    with host() as (name, here, link):
        async with replay_node(data_dir=data, min_size=20, listen=Address(here, 0), insecure=True) as replay:
            arguments = learner_arguments(str(replay.address), tmp_path / "run")
            with process(*arguments, within=("ip", "netns", "exec", name)) as learner:
                await trained_on(replay.address)
                link.loss, link.delay_s, link.jitter_s = 0.1, 0.02, 0.02
                await trained_on(replay.address, more=50)
                assert link.lost > 0
                link.loss = 0.02
                link.down = True
                await asyncio.sleep(PARTITION_S)
                link.down = False
                await trained_on(replay.address)
                link.loss = link.delay_s = link.jitter_s = 0.0
                await trained_on(replay.address)
                agent = (await status_of(replay.address)).agents[0]
                assert (agent.lease, agent.epoch) == ("live", 1)
                learner.send(signal.SIGTERM)
                assert await asyncio.to_thread(learner.exit_code) == 0, learner.log
            assert "Traceback" not in learner.log
    check_story(storm, data, steps=[checkpoint_step(tmp_path / "run")])
