"""One agent's bad environment never touches another's training: real processes, one replay, two learners."""

import pytest
from nodes.learning_cases import checkpoint_step, status_of
from nodes.processes import learner_arguments, process, replay_process

from dase_grpc.replay.wire.addresses import parse_address

pytestmark = pytest.mark.slow

STEPS = 1_500


def learner(address, run_dir, agent_id, kwargs, **settings):
    arguments = learner_arguments(
        address,
        run_dir,
        env__id="rude:Misbehaves",
        env__kwargs=kwargs,
        train__agents=2,
        train__steps=STEPS,
        train__checkpoint_every=40,
        **settings,
    )
    return process(*arguments, f"--agent={agent_id}")


@pytest.mark.parametrize(
    ("kwargs", "settings", "sentence", "place"),
    [
        pytest.param(
            "{what = 'breaks', at = 1}",
            {"eval__max_episode_steps": 1, "eval__every": STEPS, "env__max_restarts": 2},
            "evaluation of agent 0: the environment raised RuntimeError: the simulator broke in step",
            "in breaks",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "{what = 'breaks', at = 100, ever = true}",
            {"env__max_restarts": 2},
            "agent 0 at step 99: the environment raised RuntimeError: the simulator broke in step, after 2",
            "in breaks",
            marks=pytest.mark.long,
        ),
        (
            "{what = 'sleeps_for_ever', at = 100}",
            {"env__timeout_s": 3},
            "the environment's step has not returned since",
            "in sleeps_for_ever",
        ),
    ],
    ids=["cannot be evaluated", "always raises", "hangs"],
)
async def test_an_agent_whose_environment_is_bad_ends_and_the_other_trains_to_its_end(
    tmp_path, kwargs, settings, sentence, place
):
    good_kwargs = "{what = 'nothing'}"
    with (
        replay_process() as (replay, address),
        learner(address, tmp_path / "good", 1, good_kwargs) as good,
        learner(address, tmp_path / "bad", 0, kwargs, **settings) as bad,
    ):
        assert bad.exit_code() == 1, bad.log
        assert f"error: {sentence}" in bad.log
        assert place in bad.log
        assert good.exit_code() == 0, good.log
        assert f"finished after {STEPS:,} steps" in good.log
        leases = {agent.agent_id: agent for agent in (await status_of(parse_address(address))).agents}
        assert {agent.lease for agent in leases.values()} == {"left"}
        assert sentence[:60] in leases[0].reason
        assert "Traceback" not in good.log + replay.log
    assert checkpoint_step(tmp_path / "good", 1) == STEPS
    if "at = 100" in kwargs:
        assert checkpoint_step(tmp_path / "bad", 0) == (99 if "breaks" in kwargs else 80)
