"""docs/experiments.md says what an experiment is: its file is read, its names and its exit codes compared."""

import re
import tomllib
from pathlib import Path
from typing import get_args, get_type_hints

from dase_grpc.launch.experiments import task
from dase_grpc.launch.experiments.file import SHORT, parse_experiment
from dase_grpc.launch.experiments.folder import FINISHED_FILE, OWN_FOLDER, State
from dase_grpc.launch.experiments.matrix import cells_of
from dase_grpc.launch.experiments.sites import KubernetesSite, SlurmSite

TEXT = (Path(__file__).parents[3] / "docs" / "experiments.md").read_text(encoding="utf-8")


def first_column(heading: str) -> list[str]:
    """The first column of the table under a head line's first cell."""
    lines = TEXT.split(f"| {heading} |", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    return [line.split("|")[1].strip() for line in lines]


def test_the_documented_file_is_an_experiment_with_the_documented_names():
    block, variants, *_ = re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL)
    assert len(cells_of(parse_experiment(tomllib.loads(variants), name="e")).cells) == 2
    matrix = cells_of(parse_experiment(tomllib.loads(block), name="e"))
    names = [cell.name for cell in matrix.cells]
    assert "td3_dase_Hopper-v5_capacity-100000_divergence-none_seed-0" in names
    assert names[-1] == "td3_dase_Ant-v5_agents-5"
    # td3 and sac with the small buffer, td3 with the large one: single and two divergences, 2 envs, 5 seeds
    assert len(names) == 3 * 3 * 2 * 5 + 1


def test_the_documented_tables_of_clusters_have_every_key():
    *_, slurm, kubernetes = (
        tomllib.loads(block) for block in re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL)
    )
    assert set(slurm["slurm"]) == set(SlurmSite.model_fields)
    assert set(kubernetes["kubernetes"]) == set(KubernetesSite.model_fields)
    experiment = parse_experiment({"matrix": {"seeds": 1}, **slurm, **kubernetes}, name="e")
    assert (experiment.slurm.at_once, experiment.slurm.sbatch["qos"]) == (8, "normal")
    assert experiment.kubernetes is not None


def test_the_documented_duplicates_are_six_cells():
    matrix = {"method": ["single", "dase"], "dps.divergence": ["jeffreys", "js", "kl", "none", "isolated"]}
    assert len(cells_of(parse_experiment({"matrix": matrix}, name="e")).cells) == 6


def test_the_documented_short_names_are_all():
    (listed,) = re.findall(r"one of the short names (.*?)\.", TEXT)
    assert listed.replace("`", "").split(", ") == list(SHORT)


def test_the_documented_states_are_all():
    assert set(first_column("state")) == set(get_args(get_type_hints(State)["kind"]))


def test_the_documented_exit_codes_are_those_of_the_program():
    codes = [task.ALL_FINISHED, task.SOME_FAILED, 2, task.NOTHING_KEPT, task.STOPPED]
    assert first_column("exit code") == [str(code) for code in codes]


def test_the_documented_files_have_their_names():
    assert f"`{FINISHED_FILE}`" in TEXT
    assert f"`{OWN_FOLDER}/lock`, `{OWN_FOLDER}/cells.lock`, `{OWN_FOLDER}/locks/`" in first_column(
        "path in `runs/<experiment>`"
    )
