"""What methods and mixed ensembles are in flags and files."""

import pytest
import tomli_w
from contracts.sentences import refuses

from dase_grpc.config.presets import layered
from dase_grpc.config.resolve import resolve
from dase_grpc.errors import ConfigError


def test_several_algorithms_make_a_mixed_ensemble_of_the_papers_settings():
    config = layered(flags={"agent.algorithm": "td3,sac,ddpg", "env.id": "Humanoid-v5"})
    assert config.train.agents == 3
    assert config.algorithms == ("td3", "sac", "ddpg")
    assert [each.reward_scale for each in config.members] == [1.0, 20.0, 1.0]
    assert [each.hidden for each in config.members] == [(256, 256), (256, 256), (400, 300)]
    for index, algorithm in enumerate(("td3", "sac", "ddpg")):
        alone = layered(flags={"agent.algorithm": algorithm, "env.id": "Humanoid-v5"})
        assert config.for_agent(index).agent == alone.agent
        assert config.for_agent(index).members == ()


def test_algorithms_are_dealt_out_in_turn():
    config = layered(flags={"agent.algorithm": "td3,sac", "train.agents": 5})
    assert [each.algorithm for each in config.members] == ["td3", "sac", "td3", "sac", "td3"]
    assert config.agent == config.members[0]


def test_an_agent_is_called_by_its_algorithm_too_where_there_are_several():
    mixed = layered(flags={"agent.algorithm": "td3,sac"})
    names = [mixed.agent_name(agent_id) for agent_id in (0, 1, 7)]
    assert names == ["agent 0 (TD3)", "agent 1 (SAC)", "agent 7"]
    assert mixed.for_agent(1).agent_name(1) == "agent 1"
    assert layered(flags={"agent.algorithm": "sac"}).agent_name(1) == "agent 1"


def test_what_is_said_of_the_agent_is_said_of_every_member_that_reads_it(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("[agent]\nbatch_size = 64\n")
    assignments = ["agent.policy_delay=3", "agent.policy_noise=0.2"]
    config = layered(file=path, flags={"agent.algorithm": "td3,sac"}, assignments=assignments)
    assert [each.batch_size for each in config.members] == [64, 64]
    assert [each.policy_delay for each in config.members] == [3, 2]
    assert [each.policy_noise for each in config.members] == [0.1, 0.2]


def test_a_mixed_ensemble_survives_its_file_and_is_changed_by_what_comes_after(tmp_path):
    config = layered(flags={"agent.algorithm": "td3,sac"}, assignments=["agent.start_steps=10"])
    path = tmp_path / "run.toml"
    path.write_text(tomli_w.dumps(config.model_dump(mode="json")))
    assert layered(file=path) == config
    changed = layered(file=path, assignments=["agent.batch_size=32"])
    assert [each.batch_size for each in changed.members] == [32, 32]
    assert changed.start_steps == 10


def test_a_file_may_list_members_by_hand(tmp_path):
    path = tmp_path / "mixed.toml"
    path.write_text('[train]\nagents = 2\n[[members]]\nalgorithm = "sac"\n[[members]]\nstart_steps = 7\n')
    config = layered(file=path)
    assert (config.algorithms, config.agent.algorithm) == (("sac", "td3"), "sac")
    assert config.collected_before_updates == 25_007


def test_a_file_whose_agent_is_not_its_first_member_is_refused(tmp_path):
    path = tmp_path / "mixed.toml"
    path.write_text(
        '[agent]\nbatch_size = 3\n[[members]]\nalgorithm = "sac"\n[[members]]\nalgorithm = "td3"\n'
    )
    with refuses(ConfigError, "agent and the first of members differ"):
        layered(file=path)
    with pytest.raises(ConfigError):
        resolve({"agent": {"batch_size": 3}, "members": [{}, {}]})


def test_members_are_one_table_for_each_agent():
    for members, text in ((5, "members = 5 must be a list"), ([{}], "members lists 1 agent and")):
        with refuses(ConfigError, text):
            resolve({"members": members})


@pytest.mark.parametrize(
    ("method", "flags", "found"),
    [
        ("single", {}, ("single", 1)),
        ("dase", {}, ("dase", 2)),
        ("dase", {"train.agents": 5}, ("dase", 5)),
        ("dpd", {}, ("dpd", 2)),
        ("dpd", {"train.agents": 2}, ("dpd", 2)),
        (None, {"train.agents": 1}, ("single", 1)),
    ],
)
def test_a_method_says_who_learns_from_whom(method, flags, found):
    config = layered(flags=flags, method=method)
    assert (config.method, config.train.agents) == found


def test_an_assignment_wins_over_the_method_as_over_every_flag(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[train]\nmethod = "dase"\nagents = 2\n')
    assert layered(file=path, method="dpd").method == "dpd"
    assert layered(file=path, method="single", flags={"train.agents": 1}).method == "single"
    assert layered(method="dpd", assignments=["train.method=dase"]).method == "dase"


def test_a_file_may_say_single_and_need_not_say_that_it_is_one_agent(tmp_path):
    path = tmp_path / "file.toml"
    path.write_text('[train]\nmethod = "single"\n')
    for options in ({}, {"preset_name": "paper/sac"}, {"flags": {"agent.algorithm": "ddpg"}}):
        config = layered(file=path, **options)
        assert (config.method, config.train.agents) == ("single", 1)
    assert layered(file=path, method="dase").method == "dase"
    assert layered(assignments=["train.method=single"]).train.agents == 1
    for options in ({"flags": {"train.agents": 3}}, {"assignments": ["train.agents=3"]}):
        with pytest.raises(ConfigError, match=r"single trains one agent, and train\.agents = 3"):
            layered(file=path, **options)


def test_a_mixed_ensemble_may_have_algorithms_of_ones_own():
    flags = {"agent.algorithm": "mine:Agent,sac", "train.agents": 3}
    config = layered(flags=flags, assignments=["agent.policy_noise=0.2"])
    assert [each.algorithm for each in config.members] == ["mine:Agent", "sac", "mine:Agent"]
    assert [each.policy_noise for each in config.members] == [0.2, 0.2, 0.2]
    assert [config.agent_name(agent) for agent in range(2)] == ["agent 0 (mine:Agent)", "agent 1 (SAC)"]


def test_a_pair_needs_one_discount_factor():
    pair = {"train": {"method": "dpd"}, "members": [{"gamma": 0.9}, {"gamma": 0.99}]}
    with refuses(ConfigError, "gamma has to be the same for both", "0.9 and 0.99"):
        resolve(pair)
    assert resolve({**pair, "members": [{"algorithm": "sac"}, {}]}).method == "dpd"


def test_only_a_pair_that_distils_shares_no_experience():
    shares = {method: layered(method=method).shares_experience for method in ("single", "dase", "dpd")}
    assert shares == {"single": True, "dase": True, "dpd": False}


MIXED = {"agent.algorithm": "td3,sac"}
ENDLESS: list[object] = []
ENDLESS.append(ENDLESS)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"flags": {"agent.algorithm": "td3,ppo"}}, "--algo 'td3,ppo': there is no algorithm 'ppo'"),
        ({"flags": {"agent.algorithm": "td3,"}}, "there is no algorithm ''"),
        (
            {"flags": MIXED, "assignments": ["train.agents=1"]},
            "--algo td3,sac names 2 algorithms for 1 agent;",
        ),
        (
            {"flags": MIXED, "assignments": ["agent.algorithm=ddpg"]},
            "agent.algorithm = ddpg and a mixed ensemble",
        ),
        (
            {"flags": {"agent.algorithm": "td3,ddpg"}, "assignments": ["agent.policy_noise=0.2"]},
            "read by sac only",
        ),
        ({"flags": MIXED | {"train.agents": 10**9}}, "must be at most 1024"),
        ({"flags": MIXED | {"train.agents": 0}}, "must be greater than 0"),
        ({"method": "dpd", "flags": {"agent.algorithm": "td3,sac,ddpg"}}, "--method dpd trains 2 agents"),
        ({"method": "single", "flags": MIXED}, "or choose --method dase"),
        ({"method": "single", "assignments": ["train.agents=2"]}, "trains one agent, and 2 are asked for"),
        ({"method": "single", "assignments": ['train.agents="2"']}, "trains one agent, and 2 are asked for"),
        ({"method": "single", "flags": {"train.agents": True}}, "train.agents = true must not be true"),
        ({"assignments": ["train.method=single", "train.agents=x"]}, 'train.agents = "x" must be a whole'),
        ({"method": "dase", "assignments": ["train.agents='1'"]}, "give at least --agents 2"),
        (
            {"method": "dase", "assignments": ["train.agents=1"]},
            "--method dase shares experience between agents",
        ),
        ({"method": "dpd", "assignments": ["train.agents=3"]}, "trains a pair, and train.agents = 3"),
        ({"method": "dpd", "assignments": ["dps.floor=true"]}, "the settings of dps mean nothing"),
        ({"method": "dase", "assignments": ["dpd.alpha=2"]}, "are read with train.method = dpd only"),
        ({"method": "ppo"}, "--method 'ppo' is none of single, dase and dpd"),
        ({"preset_name": ""}, "there is no preset ''"),
        ({"flags": {"train.steps": 2**63}}, "whole numbers have at most 64 bits"),
        ({"flags": {"train.seed": 10**5_000}}, "thousands of digits is too large"),
        ({"assignments": ["train.steps=" + "9" * 5_000]}, "is too large"),
        ({"assignments": ["env.kwargs.x=nan"]}, "env.kwargs: NaN equals nothing"),
        ({"assignments": ["env.kwargs.x=2024-01-31"]}, "env.kwargs: 2024-01-31 is a date or a time"),
        ({"assignments": ["env.kwargs.x=[{a=10:30:00}]"]}, "env.kwargs: 10:30:00 is a date or a time"),
        ({"flags": {"env.kwargs": {"x": ENDLESS}}}, "cannot be kept in run.toml"),
        ({"assignments": ["env.kwargs.x=\udcff"]}, "cannot be written as UTF-8"),
        ({"assignments": ["env.kwargs.x=[{a='\udcff'}]"]}, "cannot be written as UTF-8"),
    ],
)
def test_what_cannot_be_is_one_sentence(given, words):
    with refuses(ConfigError, words):
        layered(**given)


@pytest.mark.parametrize("agents", ['"1"', "1.0", "1e0", "01"])
def test_one_agent_may_be_written_in_any_way(agents):
    for given in ({"method": "single"}, {"flags": {"train.method": "single"}}):
        assert layered(assignments=[f"train.agents={agents}"], **given).train.agents == 1


@pytest.mark.parametrize("agents", [4, 4.0, "4", "4e0"])
def test_the_number_of_agents_of_a_mixed_ensemble_may_be_written_in_any_way(agents):
    config = layered(flags=MIXED | {"train.agents": agents})
    assert [each.algorithm for each in config.members] == ["td3", "sac", "td3", "sac"]
