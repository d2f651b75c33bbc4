"""`dase check-env`: every rule of training, held to environments that keep and break it."""

import pytest
from contracts.sentences import refuses
from rich.console import Console
from typer.testing import CliRunner

from dase_grpc.cli.main import app
from dase_grpc.config.sections import EnvConfig
from dase_grpc.errors import ConfigError
from dase_grpc.launch.env_check import check_env_here, rules_of
from dase_grpc.process.watchdog import Watch


def verdicts(env_id: str) -> dict[str, tuple[str, str]]:
    rules = rules_of(EnvConfig(id=env_id), Watch("test"))
    return {rule.name: (rule.verdict, rule.found) for rule in rules}


def test_a_sound_environment_keeps_every_rule():
    found = verdicts("worlds:PointGoal")
    assert len(found) == 5
    assert {verdict for verdict, _ in found.values()} == {"good"}
    assert "steps/s" in found["steps by random actions"][1]


@pytest.mark.parametrize(
    ("env_id", "rule", "verdict", "said"),
    [
        ("Nope-v1", "there is such an environment", "bad", "there is no environment"),
        ("worlds:DiscreteAction", "Gymnasium's interface, spaces we can use", "bad", "continuous actions"),
        ("worlds:WrongShape", "Gymnasium's interface, spaces we can use", "bad", "observation"),
        ("worlds:OldReset", "Gymnasium's interface, spaces we can use", "bad", "reset"),
        ("worlds:AlwaysNan", "finite numbers", "note", "not finite"),
        ("worlds:RaisesAtStep", "steps by random actions", "bad", "raised RuntimeError: the simulator broke"),
        ("worlds:Unrepeatable", "the same seed plays the same episode", "note", "lockstep runs will differ"),
    ],
)
def test_what_breaks_a_rule_is_found(env_id, rule, verdict, said):
    found = verdicts(env_id)
    assert found[rule][0] == verdict
    assert said in found[rule][1]


@pytest.mark.parametrize(("env_id", "code"), [("worlds:PointGoal", 0), ("worlds:NoSpaces", 1)])
def test_the_command_prints_a_table_and_says_by_its_code_whether_agents_can_train(env_id, code):
    done = CliRunner().invoke(app, ["check-env", env_id])
    assert done.exit_code == code, done.output
    assert "rule" in done.output
    assert "Traceback" not in done.output


@pytest.mark.parametrize(
    ("assignment", "said"),
    [
        ("agent.hidden=[4]", "--set agent.hidden says nothing about the environment"),
        ("env.id=worlds:PointGoal", "--set env.id and ID both name the environment"),
    ],
)
def test_a_setting_that_it_does_not_read_is_refused(assignment, said):
    with refuses(ConfigError, said, "leave"):
        check_env_here("worlds:PointGoal", [assignment], Console())


def test_nothing_in_the_table_is_markup():
    done = CliRunner().invoke(app, ["check-env", "[/x]:y"])
    assert done.exit_code == 1, done.output
    assert "[/x]" in done.output
