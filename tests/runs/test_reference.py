"""The published results that ship with the package."""

from importlib import resources

import pytest

from dase_grpc.runs.reference import PublishedPoint, published


def test_half_cheetah_is_found_under_its_new_id() -> None:
    rows = {row.method: row for row in published("td3", "HalfCheetah-v5", 100_000)}
    assert rows.keys() == {
        "single",
        "dpd",
        "dase-k2",
        "dase-k5",
        "dase-k10",
        "dase-k2-kl",
        "dase-k2-uncorrected",
    }
    single, shared = rows["single"], rows["dase-k2"]
    assert single.points[1] == PublishedPoint(100_000, 4655.91, 151.75)
    assert shared.points[1].mean == 5513.67
    assert (single.curves, single.cell_rank, single.seeds) == ("own", "15/30", 10)
    assert rows["dase-k5"].curves == "combination"
    assert (shared.final_mean, shared.agents, shared.environment) == (12375.37, 2, "HalfCheetah-v2")


@pytest.mark.parametrize(
    ("environment", "known_as"),
    [
        ("LunarLanderContinuous-v3", "LunarLanderContinuous-v2"),
        ("BipedalWalker-v3", "BipedalWalker-v3"),
        ("Humanoid-v4", "Humanoid-v2"),
        ("Walker2d-v2", "Walker2d-v2"),
    ],
)
def test_versions_are_mapped_to_the_published_ones(environment: str, known_as: str) -> None:
    assert {row.environment for row in published("td3", environment, 1_000_000)} == {known_as}


@pytest.mark.parametrize(
    ("algorithm", "environment", "capacity"),
    [
        ("td3", "HalfCheetah-v5", 200_000),
        ("td3", "Pendulum-v1", 100_000),
        ("td3", "BipedalWalkerHardcore-v3", 100_000),
        ("td3", "LunarLander-v3", 100_000),
        ("td3", "package.module:HalfCheetah-v5", 100_000),
        ("dpd", "HalfCheetah-v5", 100_000),
    ],
)
def test_nothing_is_compared_with_another_task_or_buffer(
    algorithm: str, environment: str, capacity: int
) -> None:
    assert published(algorithm, environment, capacity) == []


def test_the_table_ships_with_its_origin_and_license() -> None:
    folder = resources.files("dase_grpc.runs") / "published"
    assert "Copyright (c) 2022 baturaysaglam" in (folder / "LICENSE").read_text(encoding="utf-8")
    assert "arXiv 2207.13453" in (folder / "README.md").read_text(encoding="utf-8")
