"""RunConfig: frozen, complete, and every refusal is one sentence that names the setting and its value."""

import copy
import json
import tomllib

import pytest
import tomli_w
from contracts.sentences import assert_one_sentence
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from refused_settings import refusal_of, setting

from dase_grpc.config.algorithms import ALGORITHMS, DIVERGENCES, READ_BY_ONE
from dase_grpc.config.resolve import RunConfig, parse_assignments, read_toml, resolve, setting_names
from dase_grpc.errors import ConfigError

FIXED_NAMES = {
    *(
        "replay.capacity",
        "agent.algorithm",
        "agent.batch_size",
        "agent.start_steps",
        "train.steps",
        "train.seed",
    ),
    *("dps.divergence", "dps.scope", "dps.reference_variance", "eval.every", "eval.episodes"),
}

SECTIONS = {name: field.annotation for name, field in RunConfig.model_fields.items()}


@pytest.mark.parametrize("name", setting_names())
def test_every_setting_is_described(name):
    section, _, key = name.partition(".")
    description = SECTIONS[section].model_fields[key].description
    assert description
    assert not description.endswith(".")
    assert SECTIONS[section].__doc__


def test_the_names_that_documents_rely_on_are_there():
    assert set(setting_names()) >= FIXED_NAMES


def test_a_configuration_is_frozen():
    with pytest.raises(ValidationError):
        RunConfig().train.steps = 5
    with pytest.raises(ValidationError):
        RunConfig().train = RunConfig().train


kwargs = st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text() | st.booleans()
kwargs |= st.lists(st.integers(0, 9)) | st.dictionaries(st.text(), st.booleans())
configurations = st.fixed_dictionaries(
    {},
    optional={
        "env": st.fixed_dictionaries(
            {"id": st.text(min_size=1)},
            optional={"kwargs": st.dictionaries(st.text(min_size=1), kwargs, max_size=3)},
        ),
        "train": st.fixed_dictionaries(
            {}, optional={"seed": st.integers(0, 2**63 - 1), "steps": st.integers(1, 2**63 - 1)}
        ),
        "agent": st.fixed_dictionaries(
            {},
            optional={
                "hidden": st.lists(st.integers(1, 9), min_size=1, max_size=3),
                "actor_lr": st.floats(min_value=1e-300, allow_infinity=False, exclude_min=True),
                "gamma": st.floats(0, 1, exclude_max=True),
                "algorithm": st.sampled_from(ALGORITHMS),
                "normalise_observations": st.booleans(),
            },
        ),
        "replay": st.fixed_dictionaries(
            {},
            optional={"capacity": st.integers(10**6, 10**12) | st.sampled_from(["512MiB", "1000000", "2gb"])},
        ),
        "dps": st.fixed_dictionaries({}, optional={"divergence": st.sampled_from(DIVERGENCES)}),
    },
)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("toml") / "run.toml"


@pytest.mark.slow
@settings(max_examples=50)
@given(values=configurations)
def test_a_configuration_survives_a_toml_file(path, values):
    config = resolve(values)
    path.write_text(tomli_w.dumps(config.model_dump(mode="json")), encoding="utf-8")
    assert resolve(read_toml(path)) == config
    assert resolve(read_toml(path)).model_dump() == config.model_dump()


def test_a_resolved_configuration_states_every_setting():
    document = tomllib.loads(tomli_w.dumps(RunConfig().model_dump(mode="json")))
    assert [f"{section}.{key}" for section, keys in document.items() for key in keys] == setting_names()


def test_the_tables_that_a_run_directory_adds_are_left_out(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[train]\nsteps = 7\n[versions]\ndase = "9"\n[run]\nmode = "lockstep"\n')
    assert read_toml(path) == {"train": {"steps": 7}}


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (None, "cannot read the configuration"),
        ("a folder", "cannot read the configuration"),
        (b"train = [", "not valid TOML"),
        (b"\xff\xfe", "not valid TOML"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, content, named):
    path = tmp_path if content == "a folder" else tmp_path / "run.toml"
    if isinstance(content, bytes):
        path.write_bytes(content)
    with pytest.raises(ConfigError) as refusal:
        read_toml(path)
    assert str(path) in str(refusal.value)
    assert named in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_later_layers_win_setting_by_setting_over_the_defaults():
    assert resolve() == resolve({}, {}) == RunConfig()
    config = resolve({"train": {"steps": 1, "seed": 1}}, {"train": {"steps": 2}}, {"train": {"agents": 3}})
    assert (config.train.steps, config.train.seed, config.train.agents) == (2, 1, 3)


def test_keyword_arguments_of_the_environment_merge_across_layers():
    layers = [{"env": {"kwargs": {"a": {"x": 1}}}}, {"env": {"kwargs": {"a": {"y": 2}, "b": 3}}}]
    assert resolve(*layers).env.kwargs == {"a": {"x": 1, "y": 2}, "b": 3}


def test_layers_are_the_same_after_use():
    layers = [{"env": {"kwargs": {"a": {"x": 1}}}}, {"env": {"kwargs": {"a": {"x": 2}}}}]
    before = copy.deepcopy(layers)
    resolve(*layers)
    assert layers == before


WRONG = {
    'train.steps="many"': 'train.steps = "many" must be a whole number',
    "train.steps=many": 'train.steps = "many" must be a whole number',
    "train.steps=": 'train.steps = "" must be a whole number',
    "train.steps=0": "train.steps = 0 must be greater than 0",
    "train.steps=nan": "train.steps = NaN must be finite",
    "train.steps=true": "train.steps = true must not be true or false",
    "train.steps=2024-01-01": 'train.steps = "2024-01-01" must be a whole number',
    "train.steps.x=5": 'train.steps = {"x": 5} must be a whole number',
    "train.steps=1e300": "train.steps = 1e+300 is too large",
    f"train.steps={'x' * 100}": f'train.steps = "{"x" * 76}... must be a whole number',
    "train.agents=0": "train.agents = 0 must be greater than 0",
    "train.agents=1025": "train.agents = 1025 must be at most 1024",
    "train.seed=-1": "train.seed = -1 must be at least 0",
    "eval.episodes=1.5": "eval.episodes = 1.5 must be a whole number",
    "agent.batch_size=0": "agent.batch_size = 0 must be greater than 0",
    "agent.batch_size=70000": "agent.batch_size = 70000 must be at most 65536",
    "agent.start_steps=-1": "agent.start_steps = -1 must be at least 0",
    "agent.hidden=[]": "agent.hidden = [] must not be empty",
    "agent.hidden=256": "agent.hidden = 256 must be a list",
    "agent.hidden=[64, 0]": "agent.hidden.1 = 0 must be greater than 0",
    "agent.hidden=[64, 'x']": 'agent.hidden.1 = "x" must be a whole number',
    "agent.actor_lr=fast": 'agent.actor_lr = "fast" must be a number',
    "agent.actor_lr=[1]": "agent.actor_lr = [1] must be a number",
    "agent.actor_lr=inf": "agent.actor_lr = Infinity must be finite",
    "agent.gamma=1": "agent.gamma = 1 must be less than 1.0",
    "agent.n_step=0": "agent.n_step = 0 must be greater than 0",
    "agent.n_step=1001": "agent.n_step = 1001 must be at most 1000",
    "agent.n_step=1.5": "agent.n_step = 1.5 must be a whole number",
    "agent.hidden=[64,99999999999]": "agent.hidden.1 = 99999999999 must be at most 65536",
    "agent.hidden=[0]": "agent.hidden.0 = 0 must be greater than 0",
    "agent.tau=0": "agent.tau = 0 must be greater than 0.0",
    "agent.algorithm=ppo": "agent.algorithm = 'ppo' is not one of td3, ddpg, sac; name one of these, or one "
    "of your own as package.module:Class",
    "agent.reward_scale=0": "agent.reward_scale = 0 must be greater than 0",
    "agent.reward_scale=1e300": "agent.reward_scale = 1e+300 must be at most 1e+30",
    "agent.exploration_noise=1e39": "agent.exploration_noise = 1e+39 must be at most 1e+30",
    "agent.target_noise=1e300": "agent.target_noise = 1e+300 must be at most 1e+30",
    "agent.target_noise_clip=1e300": "agent.target_noise_clip = 1e+300 must be at most 1e+30",
    "agent.policy_noise=1e300": "agent.policy_noise = 1e+300 must be at most 1e+30",
    "agent.policy_noise_clip=1e300": "agent.policy_noise_clip = 1e+300 must be at most 1e+30",
    "agent.critic_weight_decay=-1": "agent.critic_weight_decay = -1 must be at least 0",
    "agent.normalise_observations=maybe": 'agent.normalise_observations = "maybe" must be true or false',
    "agent.normalise_observations=[]": "agent.normalise_observations = [] must be true or false",
    "dps.divergence=l2": "dps.divergence = \"l2\" must be 'jeffreys', 'js', 'kl', 'none' or 'isolated'",
    "dps.scope=everyone": "dps.scope = \"everyone\" must be 'pooled', 'agent' or 'transition'",
    "dps.shrinkage=1.5": "dps.shrinkage = 1.5 must be at most 1.0",
    "dps.floor=low": 'dps.floor = "low" must be true or false',
    "dps.reference_variance=0": "dps.reference_variance = 0 must be greater than 0.0",
    "replay.capacity=0": "replay.capacity = 0 must be greater than 0",
    "replay.capacity=1.5": "replay.capacity = 1.5 must be a whole number",
    "replay.capacity=true": "replay.capacity = true must not be true or false",
    "replay.capacity=5 parsecs": "replay.capacity: '5 parsecs' is neither a number of transitions nor a size",
    "replay.capacity='0'": "replay.capacity: a capacity of 0 has no room for one transition",
    "replay.prefetch=65": "replay.prefetch = 65 must be at most 64",
    "metrics.port=70000": "metrics.port = 70000 must be at most 65535",
    "env.id=": 'env.id = "" must not be empty',
    "env.id=5": "env.id = 5 must be a text",
    "env.kwargs=5": "env.kwargs = 5 must be a table",
}


@pytest.mark.parametrize("assignment", WRONG)
def test_a_wrong_value_is_refused_with_the_setting_and_the_value(assignment):
    error = refusal_of(assignment)
    assert_one_sentence(error)
    assert str(error).startswith(WRONG[assignment])


def test_a_setting_that_one_algorithm_alone_reads_says_so():
    fields = SECTIONS["agent"].model_fields
    assert set(READ_BY_ONE.values()) < set(ALGORITHMS)
    for key, field in fields.items():
        reader = READ_BY_ONE.get(key)
        named = [name for name in ALGORITHMS if f"({name} only)" in str(field.description)]
        assert named == ([reader] if reader else [])


def test_a_setting_that_is_true_or_false_is_written_so():
    for text, value in (("true", True), ("false", False)):
        assert setting(f"agent.normalise_observations={text}").agent.normalise_observations is value


@pytest.mark.parametrize("section", SECTIONS)
def test_a_section_that_is_no_table_is_refused(section):
    with pytest.raises(ConfigError) as refusal:
        resolve({section: 5})
    wanted = "a list" if section == "members" else "a table of settings"
    assert_one_sentence(refusal.value, f"{section} = 5 must be {wanted}")


IMPOSSIBLE = {
    "train.method=dpd train.cuda_graph=true": "train.cuda_graph = true records updates of train.method = ",
    "train.method=dpd eval.by=evaluator": "eval.by = evaluator is not for train.method = dpd",
    "train.overlap=true train.explore=false": "train.overlap = true is read with train.explore = true only",
    "train.explore=false train.step_error_buffer=1": "train.step_error_buffer = 1 is too small for ",
    "train.updates_per_step=2": "train.updates_per_step = 2.0 is read with explore = false only",
    "train.actors=2": "train.actors = 2 is read with explore = false only",
    "replay.capacity=255": "agent.batch_size = 256 exceeds replay.capacity = 255",
    "replay.capacity='255'": "agent.batch_size = 256 exceeds replay.capacity = 255",
    "agent.batch_size=1000 replay.capacity=999": "agent.batch_size = 1000 exceeds replay.capacity = 999",
    "replay.capacity=24999": "agent.start_steps = 25000 exceeds replay.capacity = 24999",
    "replay.capacity=1000 replay.min_size=1001 agent.start_steps=900": (
        "replay.min_size = 1001 exceeds replay.capacity = 1000"
    ),
    "replay.min_size=50001": "replay.min_size = 50001 exceeds the 50000 transitions",
    "agent.start_steps=0 replay.min_size=3": "replay.min_size = 3 exceeds the 2 transitions",
    "replay.capacity=1": "agent.batch_size = 256 exceeds replay.capacity = 1",
    "metrics.port=65535": "metrics.port = 65535 leaves no port for agent 1; set it to at most 65533",
    "metrics.port=65532 train.explore=false train.actors=1": (
        "metrics.port = 65532 leaves no port for an actor of agent 1; set it to at most 65531"
    ),
    "metrics.port=9 train.explore=false train.actors=64 train.agents=1024": (
        "metrics.port = 9 leaves no port for an actor of agent 1023; leave it out"
    ),
    "agent.algorithm=ddpg agent.target_noise=0.3": (
        "agent.target_noise = 0.3 is read by td3 only, and algorithm is ddpg;"
    ),
    "agent.policy_noise=0": "agent.policy_noise = 0.0 is read by sac only, and algorithm is td3;",
}


@pytest.mark.parametrize("assignments", IMPOSSIBLE)
def test_settings_that_cannot_work_together_are_refused_naming_both(assignments):
    error = refusal_of(*assignments.split())
    assert_one_sentence(error)
    assert str(error).startswith(IMPOSSIBLE[assignments])


@pytest.mark.parametrize(
    "assignments",
    [
        "replay.capacity=25000",
        "agent.batch_size=1000 replay.capacity=1000 agent.start_steps=1000",
        "replay.min_size=50000",
        "agent.start_steps=0 replay.min_size=2",
        "metrics.port=65533",
        "metrics.port=65531 train.explore=false train.actors=1",
        "train.agents=1024",
        "agent.algorithm=sac agent.policy_noise=0.2 agent.target_noise=0.2",
        "agent.algorithm=ddpg agent.normalise_observations=true",
    ],
)
def test_the_last_combinations_that_work_are_accepted(assignments):
    assert resolve(parse_assignments(assignments.split()))


@pytest.mark.slow
@settings(max_examples=150)
@given(
    st.sampled_from(setting_names()).filter(lambda name: name != "env.kwargs"),
    st.none() | st.floats() | kwargs | st.integers() | st.lists(st.integers() | st.text(), max_size=3),
)
def test_whatever_is_given_the_answer_is_a_configuration_or_one_sentence(name, value):
    section, _, key = name.partition(".")
    try:
        answer = json.dumps(resolve({section: {key: value}}).model_dump(mode="json"))
    except ConfigError as error:
        answer = str(error)
    assert "\n" not in answer
    assert answer.startswith("{") or any(known in answer for known in setting_names())
    assert "Input should" not in answer
