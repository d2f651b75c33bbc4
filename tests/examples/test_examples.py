"""The examples, as their docstrings say they are run."""

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from children import importing
from nodes.learning_cases import status_of
from nodes.processes import replay_process
from patience import PATIENCE_S
from small import small_flags
from typer.testing import CliRunner

from dase_grpc.cli.main import app
from dase_grpc.replay.wire.addresses import parse_address
from dase_grpc.runs.directory import RunDirectory
from dase_grpc.runs.logs import read_metrics

EXAMPLES = Path(__file__).parents[2] / "examples"
DOCS = EXAMPLES.parent / "docs"

pytestmark = pytest.mark.slow


def python(*arguments: object, folder: Path) -> str:
    """What a command prints, run in `folder` with the examples at hand; it must succeed."""
    answer = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        env=importing(EXAMPLES),
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout


def trained(name: str, *flags: str, folder: Path) -> RunDirectory:
    """A short run in the example's environment, where the examples are found."""
    command = ["train", "--lockstep", f"--name={name}", *small_flags("my_env:Cart"), *flags]
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        patch.chdir(folder)
        ended = CliRunner().invoke(app, command)
    assert ended.exit_code == 0, ended.output
    return RunDirectory.open(folder / "runs" / name)


def assert_shown(example: str, page: str) -> None:
    """The first code on a page is the example's."""
    shown, *_ = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    lines = (EXAMPLES / example).read_text().splitlines()
    assert [line for line in shown.splitlines() if line not in lines] == []


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> RunDirectory:
    return trained("cart", folder=tmp_path_factory.mktemp("examples"))


def test_the_own_environment_trains(run):
    assert run.config.env.id == "my_env:Cart"
    assert run.report.is_file()


def test_the_own_measure_weighs_by_age_and_is_what_its_page_shows(tmp_path):
    flags = "--set=dps.measure=my_measure:fresh", "--set=dps.divergence=none"
    (agent, *_) = trained("fresh", *flags, folder=tmp_path).agents()
    weight = read_metrics(agent.metrics.path)[-1]["similarity_weight"]
    assert 2 ** (-120 / 1_000) < weight < 1  # of λ = 1, after 120 updates at most
    assert_shown("my_measure.py", "measures.md")


def test_the_own_agent_explores_otherwise_and_is_what_its_page_shows(tmp_path, run):
    drifted = trained("drift", "--set=agent.algorithm=my_agent:DriftingTD3", folder=tmp_path)
    ours, theirs = (read_metrics(each.agents()[0].metrics.path)[-1] for each in (drifted, run))
    assert ours["updates"] == theirs["updates"]
    assert ours["critic_loss"] != theirs["critic_loss"]
    assert_shown("my_agent.py", "agents.md")


def test_a_trained_policy_can_be_used(run):
    said = python(EXAMPLES / "use_policy.py", run.path, folder=run.path)
    assert re.fullmatch(r"after 120 steps of training, agent 0 returns -\d+\.\d\n", said)


def test_runs_can_be_plotted(run, tmp_path):
    picture = tmp_path / "curves.png"
    python(EXAMPLES / "plot_run.py", run.path, "--out", picture, folder=tmp_path)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_an_own_learner_learns_and_each_of_its_steps_is_stored_once(tmp_path):
    with replay_process("--capacity=100000", "--min-size=2000") as (_, address):
        said = python(EXAMPLES / "own_learner.py", address, folder=tmp_path)
        status = asyncio.run(status_of(parse_address(address)))
    returns = [int(each) for each in re.findall(r"return (\d+)$", said, re.MULTILINE)]
    learned = returns[len(returns) // 2 :]  # many: a policy is now and then worse than the one before
    assert np.mean(learned) > 3 * np.mean(returns[:50])
    assert (status.buffer.size, status.buffer.inserted_total) == (12_000, 12_000)
    assert status.agents[0].reason == "left after 12,000 transitions"
