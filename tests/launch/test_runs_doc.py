"""docs/runs.md says what a run writes: its tables are compared with a short lockstep run, its code is run."""

import json
import os
import re
from pathlib import Path
from threading import Event

import numpy as np
import pytest
import torch
from small import new_run, small_config

from dase_grpc.launch.lockstep import BUFFER_FILE, open_lockstep, run_lockstep
from dase_grpc.learning.agents.registry import ALGORITHMS, make_agent
from dase_grpc.learning.training.updates import DIAGNOSE_EVERY
from dase_grpc.runs.checkpoint import KEEP, METADATA_FILE, STATE_FILE, TRAINING_FILE, latest, load_checkpoint
from dase_grpc.runs.directory import RunDirectory, versions
from dase_grpc.runs.logs import COLUMNS, read_metrics

TEXT = (Path(__file__).parents[2] / "docs" / "runs.md").read_text(encoding="utf-8")


def tables(section: str) -> list[list[list[str]]]:
    """The tables of a section, head lines included, cells without backquotes."""
    body = TEXT.split(f"## {section}\n", 1)[1].split("\n## ", 1)[0]
    found = re.findall(r"(?:^\|.*\|\n)+", body, re.MULTILINE)
    return [
        [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in table.splitlines()]
        for table in found
    ]


def names(section: str, index: int = 0) -> list[str]:
    """The first column of a section's table."""
    return [row[0] for row in tables(section)[index][2:]]


def train(folder: Path) -> RunDirectory:
    run = new_run(folder, small_config())
    with open_lockstep(run.config, run) as lockstep:
        run_lockstep(lockstep, Event(), lambda: None)
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> RunDirectory:
    return train(tmp_path_factory.mktemp("one"))


def test_the_documented_columns_are_those_of_evaluations_csv(run):
    assert names("evaluations.csv") == list(COLUMNS)
    header = run.agent(0).evaluations.path.read_text(encoding="utf-8").splitlines()[0]
    assert header == ",".join(names("evaluations.csv"))


def test_the_documented_keys_are_those_of_metrics_jsonl(run):
    for record in read_metrics(run.agent(0).metrics.path):
        assert names("metrics.jsonl") == list(record)
    assert f"every {DIAGNOSE_EVERY}th of its updates" in TEXT


@pytest.mark.slow
def test_the_documented_keys_of_a_pair_that_distils_come_after_those(tmp_path):
    run = new_run(tmp_path, small_config(train__method="dpd"))
    with open_lockstep(run.config, run) as lockstep:
        run_lockstep(lockstep, Event(), lambda: None)
    for record in read_metrics(run.agent(0).metrics.path):
        assert names("metrics.jsonl") + names("metrics.jsonl", 1) == list(record)
    kept = load_checkpoint(latest(run.agent(0).checkpoints))
    alone = make_agent(run.config.agent, kept.schema, seed=1, agent_id=0, device=torch.device("cpu"))
    added = {name.split(".")[0] for name in kept.tensors} - {
        name.split(".")[0] for name in alone.state_dict()
    }
    said = TEXT.split("With `--method dpd` there are ")[1].split("\n")[0]
    assert added == {
        "distillation_optimizer",
        "distillation_totals",
        "peer",
        "peer_version",
        "published",
        "published_version",
    }
    assert all(f"`{name}`" in said for name in added)


def test_the_documented_keys_are_those_of_a_checkpoint(run):
    path = latest(run.agent(0).checkpoints)
    assert {file.name for file in path.iterdir()} == {METADATA_FILE, STATE_FILE, TRAINING_FILE}
    metadata = json.loads((path / METADATA_FILE).read_text(encoding="utf-8"))
    said = [name.strip("` ") for cell in names("Checkpoints", 0) for name in cell.split(",")]
    assert sorted(said) == sorted(metadata)
    assert metadata["format_version"] == int(tables("Checkpoints")[0][2][1])
    assert f"the last {KEEP} are kept" in TEXT


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_documented_tensors_are_those_of_each_algorithm(run, algorithm):
    head, _, *rows = tables("Checkpoints")[1]
    column = head.index(algorithm)
    said = {row[0]: row[column] for row in rows}
    schema = load_checkpoint(latest(run.agent(0).checkpoints)).schema
    for normalised, meant in ((False, {"yes"}), (True, {"yes", "with `agent.normalise_observations"})):
        config = small_config(agent__algorithm=algorithm, agent__normalise_observations=normalised)
        agent = make_agent(config.agent, schema, seed=1, agent_id=0, device=torch.device("cpu"))
        written = {name.split(".")[0] for name in agent.state_dict()}
        assert written == {name for name, cell in said.items() if cell in meant}


def test_the_documented_tables_are_those_of_run_toml(run):
    said = TEXT.split("## run.toml\n")[1].split("\n## ")[0]
    for key in run.run:
        assert f"`{key}`" in said or f"`[run.{key}]`" in said
    assert run.versions.keys() == versions().keys()


def test_the_documented_code_runs(run, monkeypatch):
    policy, buffer = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    monkeypatch.chdir(run.path.parent)
    (run.path.parent / "runs").symlink_to(run.path.parent)
    (run.path.parent / "NAME").symlink_to(run.path)
    scope = {"numpy": np}
    exec(policy, scope)
    exec(buffer, scope)
    assert scope["action"].shape == (1, 1)
    assert set(scope["named"]["agent_id"].tolist()) == {0, 1}


@pytest.mark.slow
def test_two_lockstep_runs_differ_where_the_page_says_so(run, tmp_path):
    other = train(tmp_path)
    equal = {row[0]: row[1:] for row in tables("Which files are equal in two lockstep runs")[0][2:]}
    for name in (STATE_FILE, TRAINING_FILE, METADATA_FILE, BUFFER_FILE, "rows-*.npy", "round-*.json"):
        assert any(name in row and cells[0] == "byte for byte" for row, cells in equal.items())
    kept = [*run.path.glob("agents/*/checkpoints/*/*"), *run.replay.iterdir()]
    assert len(kept) == 2 * 3 + 3
    for file in kept:
        assert file.read_bytes() == (other.path / file.relative_to(run.path)).read_bytes()
    timed = set(re.findall(r"\w+", equal["metrics.jsonl"][1]))
    for here, there in zip(
        read_metrics(run.agent(0).metrics.path), read_metrics(other.agent(0).metrics.path), strict=True
    ):
        assert {key for key in here if here[key] != there[key]} <= timed < here.keys()


def test_every_file_of_a_run_is_in_the_table(run):
    said = names("Which files are equal in two lockstep runs")
    top = TEXT.split("## run.toml")[0]
    for folder, _, files in os.walk(run.path):
        for file in files:
            place = (Path(folder) / file).relative_to(run.path)
            name = re.sub(r"(rows|round)-[\d-]+", r"\1-*", place.name)
            assert name in f"{top}{said}" or "tensorboard" in place.parts
