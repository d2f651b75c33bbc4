"""A study: what finished runs came to is kept once, goes on elsewhere, and becomes tables."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from dase_grpc.cli.main import app
from dase_grpc.config.resolve import resolve
from dase_grpc.launch.experiments.folder import FINISHED_FILE
from dase_grpc.runs.curves import Series
from dase_grpc.runs.directory import RUN_FILE, RunDirectory
from dase_grpc.runs.logs import read_evaluations
from dase_grpc.runs.reports.sources import LeftOut, SourceRun, grouped

FILE = """
name = "tiny"
[set]
env = "Pendulum-v1"
steps = 60
agent.start_steps = 20
agent.hidden = [8]
agent.batch_size = 16
eval.every = 20
eval.episodes = 2
eval.max_episode_steps = 20
train.checkpoint_every = 60
[matrix]
seeds = 2
[[variant]]
method = "single"
[[variant]]
method = "dase"
agents = 2
dps.divergence = "none"
"""

pytestmark = pytest.mark.slow


@pytest.fixture
def studies(script):
    return script("studies")


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("study")
    (folder / "tiny.toml").write_text(FILE)
    ended = CliRunner().invoke(app, ["experiment", str(folder / "tiny.toml"), "--runs", str(folder)])
    assert ended.exit_code == 0, ended.output
    return folder / "tiny"


def states(runs: Path) -> str:
    experiment = runs.parent / "tiny.toml"
    return (
        CliRunner()
        .invoke(app, ["experiment", str(experiment), "--runs", str(runs.parent), "--dry-run"])
        .output
    )


def test_finished_runs_are_kept_once_and_are_not_run_again_elsewhere(studies, runs, tmp_path):
    kept, elsewhere = tmp_path / "kept", tmp_path / "elsewhere" / "tiny"
    assert len(studies.keep(runs, kept)) == 4
    assert studies.keep(runs, kept) == []
    names = {path.name for path in kept.rglob("*") if path.is_file()}
    assert names == {RUN_FILE, FINISHED_FILE, "evaluations.csv", studies.POLICIES_FILE}
    assert not [file for file in kept.rglob(RUN_FILE) if str(runs.parent) in file.read_text()]
    assert studies.main(["restore", str(kept), str(elsewhere)]) == 0
    shutil.copy(runs.parent / "tiny.toml", elsewhere.parent)
    assert "4 cells: 4 finished" in states(elsewhere)
    assert studies.restore(kept, elsewhere) == []


def test_what_has_not_finished_is_not_kept(studies, runs, tmp_path):
    copy = tmp_path / "tiny"
    shutil.copytree(runs, copy)
    for finished in sorted(copy.glob(f"*/{FINISHED_FILE}"))[1:]:
        finished.unlink()
    assert len(studies.keep(copy, tmp_path / "kept")) == 1


def test_the_tables_say_what_the_evaluations_do(studies, runs, tmp_path, capsys):
    kept = tmp_path / "kept"
    studies.keep(runs, kept)
    assert studies.main(["tables", str(kept), "--reference", "nobody", "--at", "60"]) == 1
    assert "Pendulum-v1 has no 'nobody'; there are single, DASE K=2" in capsys.readouterr().err
    assert studies.main(["tables", str(kept), "--reference", "single", "--at", "40", "60"]) == 0
    text = capsys.readouterr().out
    assert "### Pendulum-v1" in text
    finals: dict[str, dict[int, float]] = {"DASE K=2": {}, "single": {}}
    for path in kept.iterdir():
        run = RunDirectory.open(path)
        curve = np.mean([read_evaluations(a.evaluations.path).return_mean for a in run.agents()], axis=0)
        name = "single" if run.config.train.agents == 1 else "DASE K=2"
        finals[name][run.config.train.seed] = curve[-3:].mean()
    for name, values in finals.items():
        (line,) = [
            each
            for each in text.splitlines()
            if each.startswith(f"| {name} | 60 | 2 | ") and each.count("|") == 9
        ]
        assert f"{np.mean([*values.values()]):,.0f} [".replace("-", "−") in line
    gained = np.mean([finals["DASE K=2"][seed] - finals["single"][seed] for seed in (0, 1)])
    (line,) = [
        each
        for each in text.splitlines()
        if each.startswith("| DASE K=2 | 60 | 2 | ") and each.count("|") == 9
    ]
    assert f"| {gained:,.0f} [".replace("-", "−") in line
    assert "| mean of agents | best | ensemble |" in text


def test_scores_of_policies_come_from_the_same_fresh_episodes(studies, runs):
    (pair,) = [path for path in runs.iterdir() if path.name.startswith("seed-0_dase")]
    scores = {each.policy: each for each in studies.policy_scores(pair)}
    assert list(scores) == ["0", "1", "best", "ensemble"]
    assert scores["best"].return_mean in (scores["0"].return_mean, scores["1"].return_mean)
    noted = [json.loads(line) for line in (pair / "scores.jsonl").read_text().splitlines()]
    assert noted[-1]["return_mean"] == scores["ensemble"].return_mean
    (alone,) = [path for path in runs.iterdir() if path.name.startswith("seed-0_single")]
    assert [each.policy for each in studies.policy_scores(alone)] == ["0"]


def test_a_page_is_filled_from_what_is_kept(studies, script, runs, tmp_path, capsys):
    study_page = script("study_page")
    kept = tmp_path / "results" / "tiny"
    studies.keep(runs, kept)
    parts = ("runs", "scores", "rule", "policies", "curves")
    page = kept.with_suffix(".md")
    page.write_text("".join(f"{part}:\n<!-- {part} -->\n<!-- end of {part} -->\n" for part in parts))
    assert study_page.main([str(kept), "--at", "60", "--rival", "single", "--seeds", "2"]) == 0
    text = page.read_text()
    assert "4 runs; seeds 0, 1; 360 environment steps" in text
    assert "| at 60 steps | Pendulum-v1 |" in text
    assert "| Pendulum-v1 | 2 | " in text
    assert "../images/tiny-2-agents.png" in text
    assert (tmp_path / "images" / "tiny-2-agents.png").stat().st_size > 1_000
    assert study_page.main([str(kept), "--at", "60", "--rival", "nobody"]) == 1
    assert "has no 'nobody'" in capsys.readouterr().err
    assert page.read_text() == text


def run_of(environment, **settings):
    method = settings.pop("method", "dase")
    train = {"agents": 1 if method == "single" else settings.pop("agents", 2)}
    replay = {"own_share": settings.pop("own_share", "uniform")}
    config = resolve({"env": {"id": environment}, "train": train, "replay": replay, "dps": settings})
    curve = Series(np.array([0, 60]), np.zeros(2))
    return SourceRun(Path(), "", "lockstep", config, {}, curve, evaluated=2, finished=True)


VARIANTS = {
    "single": {"method": "single"},
    "DASE K=2, isolated": {"divergence": "isolated"},
    "DASE K=2, jeffreys": {},
    "DASE K=2, js": {"divergence": "js"},
    "DASE K=2, jeffreys, normalise": {"normalise": True},
    "DASE K=2, jeffreys, scope=transition, normalise": {"scope": "transition", "normalise": True},
    "DASE K=2, advantage": {"measure": "advantage"},
    "DASE K=2, none, own_share=0.5": {"divergence": "none", "own_share": 0.5},
    "DASE K=5, jeffreys": {"agents": 5},
}


@pytest.mark.parametrize("finished", range(3, len(VARIANTS) + 1))
def test_a_row_has_its_name_in_every_environment_whatever_else_has_finished(studies, finished):
    names = list(VARIANTS)
    here = [run_of("Hopper-v5", **VARIANTS[name]) for name in names]
    there = [run_of("Walker2d-v5", **VARIANTS[name]) for name in names[:finished]]
    groups = grouped([*here, *there])
    told = dict(zip(map(id, groups), studies.names_of(groups), strict=True))
    for environment, expected in (("Hopper-v5", names), ("Walker2d-v5", names[:finished])):
        found = {told[id(group)] for group in groups if group.environment == environment}
        assert found == set(expected)
    alone = grouped(there)
    assert set(studies.names_of(alone)) == set(names[:finished])


def test_the_rule_asks_both_scores_against_every_rival(studies, script):
    study_page = script("study_page")

    def row(label, *, final, area):
        by_seed = [dict(enumerate(np.add(value, np.arange(5)).tolist())) for value in (final, area)]
        return studies.Row(label, 60, *by_seed, {})

    rivals = [row("single", final=10, area=10), row("isolated", final=0, area=20)]
    asked = {(11, 21): "above", (11, 20): "–", (9, 30): "below", (30, 19): "below", (10, 21): "–"}
    for (final, area), verdict in asked.items():
        shared = row("shared", final=final, area=area)
        assert study_page.asked(shared, rivals, seeds=5) == verdict
        assert study_page.asked(shared, rivals, seeds=6) == "–"


def test_there_is_no_verdict_where_a_seed_of_a_rival_is_missing(studies, script):
    study_page = script("study_page")
    better, rival = (
        studies.Row(name, 60, *({seed: score + seed for seed in range(seeds)} for _ in range(2)), {})
        for name, score, seeds in (("shared", 10, 6), ("single", 0, 7))
    )
    assert study_page.asked(better, [rival], seeds=5) == "–"


def test_the_page_names_what_is_left_out(studies, script, runs, tmp_path):
    study_page = script("study_page")
    kept = tmp_path / "tiny"
    studies.keep(runs, kept)
    (broken,) = [path for path in kept.iterdir() if path.name.startswith("seed-0_single")]
    file = broken / "agents" / "0" / "evaluations.csv"
    file.write_text(re.sub(r"^60,[^,]*", "60,nan", file.read_text(), flags=re.MULTILINE))
    found = studies.Kept.read(kept)
    assert [type(each) for each in found.left_out] == [LeftOut]
    assert f"{broken} is left out: it has evaluations that are not finite" in study_page.provenance(found)
