"""What is DDPG's own: one late-action critic, no noise, no delay, L2 on all of the critic."""

from learning.agent_cases import CONFIGS, make

from dase_grpc.config.presets import preset
from dase_grpc.config.resolve import resolve

DDPG = CONFIGS["ddpg"]


def test_there_is_one_critic_and_no_noise_in_the_state():
    state = make(DDPG).state_dict()
    assert state["critic.weight.0"].shape == (3, 6)
    assert state["critic.weight.1"].shape == (6, 5)
    assert state["critic.action_weight"].shape == (2, 5)
    assert not [name for name in state if "noise" in name]


def test_the_paper_preset_builds_400_and_300_units_with_the_action_beside_the_400():
    config = resolve(preset("paper/ddpg")).agent
    state = make(config).state_dict()
    assert state["actor.weight.1"].shape == (300, 400)
    assert state["critic.weight.1"].shape == (400, 300)
    assert state["critic.action_weight"].shape == (2, 300)
    assert "normaliser.mean" in state
