"""examples/experiments: every file resolves, and is what it says it is."""

from pathlib import Path

import pytest

from dase_grpc.config.presets import ENVIRONMENTS, layered
from dase_grpc.launch.experiments.file import read_experiment
from dase_grpc.launch.experiments.matrix import RunCell, cells_of

FOLDER = Path(__file__).parents[2] / "examples" / "experiments"
COUNTS = {
    "two-minutes": 6,
    "paper-td3-small-buffer": 160,
    "ablation-divergences": 120,
    "bfloat16": 12,
    "own-share": 15,
    "sharing": 225,
    "sharing-batch": 5,
    "sharing-paper": 12,
    "sharing-share": 10,
    "td3-million": 1,
}


def cells(name: str) -> list[RunCell]:
    return list(cells_of(read_experiment(FOLDER / f"{name}.toml")).cells)


def test_every_file_is_tested():
    assert {path.stem for path in FOLDER.iterdir()} == set(COUNTS)


@pytest.mark.parametrize(("name", "count"), COUNTS.items())
def test_a_file_resolves_to_its_cells(name, count):
    assert len(cells(name)) == count


def test_the_papers_experiment_is_the_papers_preset():
    found = {cell.name: cell for cell in cells("paper-td3-small-buffer")}
    assert {cell.config.env.id for cell in found.values()} == set(ENVIRONMENTS.values())
    assert sum(cell.steps for cell in found.values()) == 240_000_000
    for method in ("single", "dase"):
        assert found[f"Hopper-v5_seed-7_{method}"].config == layered(
            preset_name="paper/td3/Hopper",
            file=None,
            flags={"replay.capacity": 100_000, "train.seed": 7},
            assignments=[],
            method=method,
        )


def test_the_ablation_has_one_base_line_and_every_divergence():
    swimmer = [cell for cell in cells("ablation-divergences") if cell.name.startswith("Swimmer-v5_seed-0")]
    assert [cell.config.method for cell in swimmer].count("single") == 1
    assert {cell.config.dps.divergence for cell in swimmer if cell.config.method == "dase"} == {
        "jeffreys",
        "js",
        "kl",
        "none",
        "isolated",
    }
