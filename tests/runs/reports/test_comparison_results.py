"""The comparison's numbers, from runs whose evaluations are known."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic import flat, write_run

from dase_grpc.errors import RunDirectoryError
from dase_grpc.runs.reference import PublishedPoint
from dase_grpc.runs.reports.compare import Caution, CellResults, Comparison, EnvironmentResults, compare


def rising(slope: float, count: int = 101) -> list[float]:
    return [slope * index for index in range(count)]


def only(comparison: Comparison) -> EnvironmentResults:
    (found,) = comparison.environments
    return found


def compared(root: Path, **curves: list[list[float]]) -> EnvironmentResults:
    """A run of each name whose agents had these curves, compared."""
    for name, agents in curves.items():
        write_run(root, name, *agents)
    return only(compare([root]))


def without(run: Path, agent: int, kept: slice) -> None:
    """Leaves these evaluations of an agent, and no others."""
    file = run / "agents" / str(agent) / "evaluations.csv"
    header, *lines = file.read_text().splitlines()
    file.write_text("\n".join([header, *lines[kept], ""]))


def cell(each: EnvironmentResults, label: str) -> CellResults:
    (found,) = (cell for cell in each.cells if cell.label == label)
    return found


def test_scores_of_known_curves(tmp_path: Path) -> None:
    for seed, slope in enumerate((1.0, 2.0, 6.0)):
        write_run(tmp_path, f"run{seed}", rising(slope), seed=seed)
    (found,) = only(compare([tmp_path])).cells
    assert found.label == "TD3, single"
    assert found.final.values == (95.5, 191, 573)  # 91 ... 100, times the slope
    assert found.final.mean == found.final.iqm == 95.5 * 3
    assert found.area.values == (50, 100, 300)  # 0 ... 100
    assert found.best.values == (100, 200, 600)
    assert found.final.std == pytest.approx(95.5 * np.std([1, 2, 6], ddof=1))
    assert found.final.interval is not None
    assert found.final.interval.low == 95.5  # each seed alone is among the resamples of three
    assert found.final.interval.high == 573


def test_the_agents_of_a_run_are_averaged_before_anything_else(tmp_path: Path) -> None:
    write_run(tmp_path, "a", [0, 30, 0], [0, 10, 40], seed=0)
    (found,) = only(compare([tmp_path])).cells
    assert (found.final.values, found.best.values) == ((40 / 3,), (20,))  # 0, 20, 20; not 30 or 40


def test_runs_of_unequal_length_are_compared_on_the_steps_they_share(tmp_path: Path) -> None:
    write_run(tmp_path, "long", rising(1, 201), seed=0)
    write_run(tmp_path, "short", rising(3, 101), seed=1)
    comparison = compare([tmp_path])
    each = only(comparison)
    assert each.last_step == 100_000
    assert cell(each, "TD3, single").final.values == (95.5, 286.5)
    where = ("HalfCheetah-v5: step 100,000; they reach from 100,000 to 200,000",)
    text = "the runs do not reach equally far and are compared up to the last step that all share"
    assert Caution(text, where) in comparison.cautions


def test_evaluations_at_other_steps_are_compared_where_both_have_one(tmp_path: Path) -> None:
    write_run(tmp_path, "often", rising(1, 201), every=500)
    write_run(tmp_path, "seldom", rising(2, 101), every=1_000)
    each = only(compare([tmp_path]))
    assert each.steps.tolist() == list(range(0, 100_001, 1_000))
    assert cell(each, "every=500").final.values == (191,)
    assert cell(each, "every=1000").final.values == (191,)
    assert cell(each, "every=500").area.values == (100,)


def test_at_equal_total_steps_an_agent_among_k_has_made_its_share(tmp_path: Path) -> None:
    each = compared(tmp_path, single=[rising(1)], pair=[rising(1)] * 2)
    assert (each.last_step, each.total_steps, each.sizes_differ) == (100_000, 100_000, True)
    single, pair = cell(each, "single"), cell(each, "DASE K=2")
    assert (single.equal_total_steps, pair.equal_total_steps) == (100_000, 50_000)
    assert (single.equal_total.values, pair.equal_total.values) == ((95.5,), (45.5,))
    assert single.final.values == pair.final.values == (95.5,)


def test_a_longer_single_run_is_compared_with_the_whole_of_a_pair(tmp_path: Path) -> None:
    each = compared(tmp_path, single=[rising(1, 201)], pair=[rising(1)] * 2)
    assert (each.last_step, each.total_steps) == (100_000, 200_000)
    assert cell(each, "single").equal_total.values == (195.5,)
    assert cell(each, "DASE K=2").equal_total.values == (95.5,)
    assert cell(each, "single").final.values == (95.5,)


def test_a_number_of_steps_that_k_does_not_divide_is_rounded_down_to_an_evaluation(tmp_path: Path) -> None:
    each = compared(tmp_path, single=[rising(1)], three=[rising(1)] * 3)
    assert cell(each, "DASE K=3").equal_total_steps == 33_000


def test_each_pair_of_one_environment_has_its_probability_for_each_measure(tmp_path: Path) -> None:
    for seed, value in enumerate((1.0, 3.0, 5.0)):
        write_run(tmp_path, f"single{seed}", flat(value), seed=seed)
        write_run(tmp_path, f"pair{seed}", flat(value + 1), flat(value + 1), seed=seed)
        write_run(tmp_path, f"ant{seed}", flat(9), seed=seed, settings={"env": {"id": "Ant-v5"}})
    ant, cheetah = compare([tmp_path]).environments
    assert (ant.name, ant.pairs, len(cheetah.pairs)) == ("Ant-v5", {}, 6)
    for measure in ("final", "area", "equal_total"):
        found = cheetah.pair("DASE K=2", "single", measure)
        assert found.probability == 6 / 9  # 2 beats 1; 4 beats 1 and 3; 6 beats all
        assert cheetah.pair("single", "DASE K=2", measure).probability == 3 / 9


def test_several_paths_are_one_comparison_and_order_does_not_matter(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / name, name, flat(seed), seed=seed) for seed, name in enumerate("ab")]
    assert [run.seed for run in compare(map(str, reversed(paths))).runs] == [0, 1]


def test_few_runs_bring_cautions_and_many_bring_none(tmp_path: Path) -> None:
    for seed in range(5):
        write_run(tmp_path / "five", str(seed), flat(seed), seed=seed)
    assert compare([tmp_path / "five"]).cautions == ()
    lone = compare([tmp_path / "five" / "0"]).cautions
    assert lone == (Caution("1 run, so no interval", ("HalfCheetah-v5: TD3, single",)),)
    few = compare([tmp_path / "five" / name for name in "0123"]).cautions
    text = "fewer than 5 runs, so an interval that means little"
    assert few == (Caution(text, ("HalfCheetah-v5: TD3, single",)),)


def test_a_caution_is_said_once_with_the_cells_that_it_holds_for(tmp_path: Path) -> None:
    for name in ("Ant-v5", "HalfCheetah-v5"):
        for agents in (1, 2, 5):
            write_run(tmp_path, f"{name}{agents}", *[flat(1)] * agents, settings={"env": {"id": name}})
    caution, *_ = compare([tmp_path]).cautions
    assert str(caution) == (
        "1 run, so no interval:\n"
        "  Ant-v5: single; DASE K=2; DASE K=5\n"
        "  HalfCheetah-v5: single; DASE K=2; DASE K=5"
    )


def test_a_seed_that_comes_twice_and_agents_that_hardly_learned_bring_cautions(tmp_path: Path) -> None:
    write_run(tmp_path, "a", flat(1, 31), seed=0)
    write_run(tmp_path, "b", flat(2, 31), seed=0)
    few, twice, early = compare([tmp_path]).cautions
    assert "fewer than 5 runs" in few.text
    assert "the same seed" in twice.text
    assert "soon after the random steps" in early.text
    assert early.where == ("HalfCheetah-v5: TD3, single (up to step 30,000, 25,000 of them random)",)


def test_runs_of_several_simulators_bring_a_caution(tmp_path: Path) -> None:
    for seed, version in enumerate(("3.3.0", "3.3.0", "4.0.0")):
        versions = {"mujoco": version, "gymnasium": "1.4.0", "torch": version}
        write_run(tmp_path, str(seed), flat(seed), seed=seed, versions=versions)
    write_run(tmp_path, "unknown", flat(9), seed=9)
    text = "the runs were made with several versions of mujoco"
    assert Caution(text, ("HalfCheetah-v5: 3.3.0, 4.0.0",)) in compare([tmp_path]).cautions
    assert "gymnasium" not in "".join(map(str, compare([tmp_path]).cautions))


def test_runs_that_share_no_step_are_one_sentence(tmp_path: Path) -> None:
    early, late = (write_run(tmp_path, name, flat(1), seed=seed) for seed, name in enumerate("ab"))
    for run, kept in ((early, slice(0, 50)), (late, slice(50, None))):
        without(run, 0, kept)
    with pytest.raises(RunDirectoryError, match=r"in HalfCheetah-v5 were evaluated at no common step"):
        compare([tmp_path], unfinished=True)


def test_agents_without_an_evaluation_so_early_are_taken_at_their_first(tmp_path: Path) -> None:
    write_run(tmp_path, "single", rising(1, 6))
    five = write_run(tmp_path, "five", *[rising(1, 6)] * 5)
    for agent in range(5):
        without(five, agent, slice(2, None))
    found = cell(only(compare([tmp_path])), "DASE K=5")
    assert (found.equal_total_steps, found.equal_total.values) == (2_000, (2,))


def test_agents_that_had_hardly_learned_at_equal_total_steps_bring_a_caution(tmp_path: Path) -> None:
    write_run(tmp_path, "single", flat(1, 61))
    write_run(tmp_path, "pair", flat(1, 61), flat(2, 61))
    (early,) = (caution for caution in compare([tmp_path]).cautions if "hardly learned" in caution.text)
    assert early.text.startswith("the score at equal total steps")
    assert early.where == ("HalfCheetah-v5: DASE K=2 (up to step 30,000, 25,000 of them random)",)


def test_unfinished_runs_are_left_out_or_used_up_to_where_they_are(tmp_path: Path) -> None:
    write_run(tmp_path, "done", flat(1), seed=0)
    write_run(tmp_path, "going", flat(2, 61), seed=1, steps=100_000)
    without = compare([tmp_path])
    assert [run.seed for run in without.runs] == [0]
    assert [each.path.name for each in without.left_out] == ["going"]
    with_it = compare([tmp_path], unfinished=True)
    assert [run.finished for run in with_it.runs] == [True, False]
    assert (only(with_it).last_step, with_it.left_out) == (60_000, ())


def test_nothing_to_compare_is_one_sentence(tmp_path: Path) -> None:
    write_run(tmp_path, "a", flat(1, 5), steps=100_000)
    write_run(tmp_path, "b", flat(1, 5), steps=100_000, seed=1)
    with pytest.raises(RunDirectoryError, match=r"none of the 2 runs.*it has not finished"):
        compare([tmp_path])


# -- beside what was published -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("agents", "settings", "method"),
    [
        (1, {}, "single"),
        (2, {}, "dase-k2"),
        (5, {}, "dase-k5"),
        (10, {}, "dase-k10"),
        (2, {"train": {"method": "dpd"}}, "dpd"),
        (2, {"dps": {"divergence": "kl"}}, "dase-k2-kl"),
        (2, {"dps": {"divergence": "none"}}, "dase-k2-uncorrected"),
        (3, {}, None),
        (2, {"dps": {"divergence": "js"}}, None),
        (2, {"dps": {"divergence": "isolated"}}, None),
        (2, {"dps": {"scope": "agent"}}, None),
        (1, {"dps": {"scope": "agent"}}, "single"),
        (2, {"agent": {"batch_size": 64}}, None),
        (1, {"replay": {"capacity": 50_000}}, None),
        (1, {"env": {"id": "Pendulum-v1"}}, None),
    ],
)
def test_the_published_counterpart(
    tmp_path: Path, agents: int, settings: dict[str, Any], method: str | None
) -> None:
    write_run(tmp_path, "run", *[flat(1, 56)] * agents, settings=settings)
    (found,) = only(compare([tmp_path])).cells
    assert (found.row.method if found.row else None) == method
    assert len(found.beside) == (0 if method is None else 1)


def test_ours_is_the_mean_of_the_evaluations_around_the_published_step(tmp_path: Path) -> None:
    write_run(tmp_path, "a", rising(1, 106), seed=0)
    write_run(tmp_path, "b", rising(2, 106), seed=1)
    (found,) = only(compare([tmp_path])).cells
    at_50k, at_100k = found.beside
    assert at_50k.ours.values == (50, 100)  # 45 ... 55
    assert at_100k.ours.values == (100, 200)
    assert at_100k.point == PublishedPoint(100_000, 4655.91, 151.75)


@pytest.mark.parametrize(
    ("last", "published"),
    [
        (54_000, []),
        (55_000, [50_000]),
        (150_000, [50_000, 100_000]),
        (500_000, [50_000, 100_000, 200_000, 300_000]),
        (505_000, [50_000, 100_000, 200_000, 300_000, 500_000]),
        (1_000_000, [50_000, 100_000, 200_000, 300_000, 500_000, 1_000_000]),
    ],
)
def test_the_published_steps_are_those_that_the_runs_reach(
    tmp_path: Path, last: int, published: list[int]
) -> None:
    (found,) = compared(tmp_path, run=[rising(1, last // 1_000 + 1)]).cells
    assert [beside.point.step for beside in found.beside] == published
    if last == 1_000_000:
        assert found.beside[-1].ours.values == found.final.values == (995.5,)
        assert found.beside[-1].point.mean == found.row.final_mean  # type: ignore[union-attr]


def test_a_longer_run_is_compared_with_the_published_final_at_a_million(tmp_path: Path) -> None:
    (found,) = compared(tmp_path, run=[rising(1, 1_101)]).cells
    assert found.beside[-1].ours.values == (995.5,)
    assert found.final.values == (1095.5,)


def test_combinations_are_known_as_such(tmp_path: Path) -> None:
    each = compared(tmp_path, five=[flat(1, 51)] * 5, pair=[flat(1, 51)] * 2)
    five, pair = cell(each, "DASE K=5").row, cell(each, "DASE K=2").row
    assert five is not None
    assert pair is not None
    assert (five.combined, pair.combined, pair.cell_rank) == (True, False, "15/30")
