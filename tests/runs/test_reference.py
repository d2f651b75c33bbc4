"""The published results that ship with the package."""

from importlib import resources
from typing import Any

import pytest

from dase_grpc.config.presets import layered, preset
from dase_grpc.config.resolve import resolve
from dase_grpc.runs.reference import PublishedPoint, counterpart, published


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


def test_points_up_to_a_step_end_with_the_final_score_at_a_million() -> None:
    (row,) = (row for row in published("td3", "HalfCheetah-v5", 100_000) if row.method == "single")
    assert [point.step for point in row.until(300_000)] == [50_000, 100_000, 200_000, 300_000]
    assert row.until(1_000_000)[-1] == PublishedPoint(1_000_000, row.final_mean, row.final_std)
    assert row.until(999_999)[-1].step == 500_000
    assert row.until(49_999) == []


@pytest.mark.parametrize(
    ("preset_name", "change", "method"),
    [
        ("paper/sac/Humanoid", {}, "dase-k2"),
        ("paper/sac/Humanoid", {"agent": {"reward_scale": 5.0}}, None),
        ("paper/ddpg/Ant", {"train": {"agents": 1}}, "single"),
        ("paper/td3/Hopper", {"train": {"method": "dpd"}}, "dpd"),
        ("paper/td3/Hopper", {"train": {"method": "dpd"}, "dpd": {"states": "all"}}, None),
        ("paper/td3/Hopper", {"env": {"kwargs": {"healthy_reward": 0}}}, None),
        ("paper/td3/Swimmer", {"dps": {"reference_variance": 0.01}}, None),
        ("paper/td3/Swimmer", {"dps": {"divergence": "none"}}, "dase-k2-uncorrected"),
        ("paper/sac/Swimmer", {"dps": {"divergence": "none"}}, None),
        ("paper/td3/Swimmer", {"replay": {"capacity": "64MiB"}}, None),
        ("paper/td3/Swimmer", {"eval": {"episodes": 1}}, None),
        ("paper/td3/Swimmer", {"eval": {"max_episode_steps": 50}}, None),
        ("paper/td3/Swimmer", {"eval": {"every": 5_000}}, None),
        ("paper/td3/Swimmer", {"replay": {"own_share": 0.5}}, None),
        ("paper/td3/Swimmer", {"replay": {"sampling": "prioritised"}}, None),
        ("paper/td3/Swimmer", {"train": {"agents": 1}, "replay": {"sampling": "prioritised"}}, None),
        ("paper/td3/Swimmer", {"train": {"explore": False, "updates_per_step": 0.25}}, None),
        ("paper/td3/Swimmer", {"train": {"explore": False, "actors": 2}}, None),
        ("paper/td3/Swimmer", {"train": {"overlap": True}}, None),
    ],
)
def test_the_counterpart_has_the_papers_settings(
    preset_name: str, change: dict[str, Any], method: str | None
) -> None:
    row = counterpart(resolve(preset(preset_name), change))
    assert (row.method if row else None) == method


def test_a_mixed_ensemble_has_no_counterpart() -> None:
    flags = {"agent.algorithm": "td3,sac", "env.id": "Ant-v5"}
    assert counterpart(layered(flags=flags)) is None


@pytest.mark.parametrize(("batch_size", "method"), [(256, "dase-k2"), (32, None)])
def test_every_member_has_the_papers_settings(batch_size: int, method: str | None) -> None:
    paper = resolve(preset("paper/td3/Ant"))
    other = paper.agent.model_copy(update={"batch_size": batch_size})
    row = counterpart(paper.model_copy(update={"members": (paper.agent, other)}))
    assert (row.method if row else None) == method


def test_the_table_ships_with_its_origin_and_license() -> None:
    folder = resources.files("dase_grpc.runs") / "published"
    assert "Copyright (c) 2022 baturaysaglam" in (folder / "LICENSE").read_text(encoding="utf-8")
    assert "arXiv 2207.13453" in (folder / "README.md").read_text(encoding="utf-8")
