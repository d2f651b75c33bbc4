"""The command line: its commands and flags, and the configuration that flags come to."""

import re
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

from dase_grpc.config.resolve import resolve
from dase_grpc.nodes.options import LearnerOptions

COMMANDS = (
    *("train", "resume", "verify", "drill", "experiment", "node", "status", "top", "config"),
    *("evaluate", "report", "compare", "certs", "version"),
)
FLAGS = {
    "train": "--env --algo --agents --steps --gpu --lockstep --set --config",
    "node": "--role --listen --capacity --data-dir --replay --env --gpu --agent --insecure",
}


def test_help_names_every_command(dase):
    code, out, _ = dase("--help")
    assert code == 0
    assert all(re.search(rf"^│ {command} ", out, re.MULTILINE) for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself_and_the_flags_that_documents_name_but_no_leash(dase, command):
    code, out, _ = dase(command, "--help")
    assert code == 0
    assert f"Usage: dase {command}" in out
    assert all(flag in out for flag in FLAGS.get(command, "").split())
    assert "leash" not in out


def test_how_another_packages_environment_is_written_stands_in_the_help_and_on_two_pages(dase):
    _, out, _ = dase("train", "--help")
    root = Path(__file__).parents[2]
    pages = [out, *((root / page).read_text() for page in ("docs/commands.md", "docs/configuration.md"))]
    assert ["package:Name-v0" in page for page in pages] == [True] * 3


def test_no_command_shows_the_help(dase):
    code, out, err = dase()
    assert code != 0
    assert "Commands" in out + err


def test_the_version_is_that_of_the_package(dase):
    for way in ("version", "--version"):
        assert dase(way) == (0, f"{version('dase-grpc')}\n", "")


def configured(dase, *arguments: object):
    code, out, err = dase("config", *arguments)
    assert (code, err) == (0, "")
    return resolve(tomllib.loads(out))


def test_config_prints_toml_that_reads_back_to_the_same_configuration(dase, tmp_path):
    arguments = ("--env", "HalfCheetah-v5", "--agents", 3, "--steps", 9_000, "--seed", 4)
    more = ("--set", "dps.divergence=kl", "--set", "replay.capacity=64MiB")
    config = configured(dase, *arguments, *more)
    assert (config.env.id, config.train.agents, config.train.steps) == ("HalfCheetah-v5", 3, 9_000)
    assert (config.train.seed, config.dps.divergence, config.replay.capacity) == (4, "kl", "64MiB")
    _, out, _ = dase("config", *arguments, *more)
    (tmp_path / "again.toml").write_text(out)
    assert dase("config", "--config", "again.toml") == (0, out, "")


@pytest.mark.parametrize(
    ("arguments", "preset"),
    [
        ((), "quickstart"),
        (("--algo", "ddpg"), "paper/ddpg"),
        (("--algo", "sac", "--env", "Humanoid-v5"), "paper/sac/Humanoid"),
        (("--env", "Ant-v5"), "paper/td3/Ant"),
        (("--set", "env.id=Hopper-v5"), "paper/td3/Hopper"),
    ],
)
def test_what_is_named_brings_the_papers_settings_and_nothing_the_quick_start(dase, arguments, preset):
    assert configured(dase, *arguments) == configured(dase, "--preset", preset)


def test_flags_win_over_the_file_and_set_over_both(dase, tmp_path):
    (tmp_path / "run.toml").write_text("[train]\nsteps = 10\nseed = 1\nagents = 1\n")
    arguments = ("--config", "run.toml", "--steps", 20, "--seed", 2, "--set", "train.seed=3")
    train = configured(dase, *arguments).train
    assert (train.agents, train.steps, train.seed) == (1, 20, 3)


@pytest.mark.parametrize("text", ["100000", "100_000", "1e5", "100000.0"])
@pytest.mark.parametrize("way", ["--steps={}", "--set=train.steps={}", '--set=train.steps="{}"'])
def test_whole_numbers_may_be_written_with_an_exponent_or_underscores(dase, way, text):
    assert configured(dase, way.format(text)).train.steps == 100_000


def test_a_learner_takes_its_metrics_port_from_the_configuration():
    config = resolve({"metrics": {"port": 9_000}, "train": {"agents": 3}})
    ports = {
        given: LearnerOptions.parse(config=config, agent_id=[2], metrics_port=given) for given in (None, 0, 7)
    }
    assert {given: made.metrics_port for given, made in ports.items()} == {None: 9_003, 0: 0, 7: 7}
