"""What a comparison writes: tables, picture and page."""

import csv
import math
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from pages import sound
from synthetic import flat, write_run

from dase_grpc.errors import RunDirectoryError
from dase_grpc.runs.curves import smoothed
from dase_grpc.runs.reports.compare import compare
from dase_grpc.runs.reports.comparison_plot import comparison_sheet as sheet
from dase_grpc.runs.reports.comparison_tables import FILES, csv_files, page, write_comparison
from dase_grpc.runs.reports.figures import PALETTE, PRINT, Sheet


@pytest.fixture
def runs(tmp_path):
    """Two seeds of a single agent, two of a pair and one of five agents."""
    root = tmp_path / "runs"
    for seed in (0, 1):
        write_run(root, f"single{seed}", flat(10 + seed), seed=seed)
        write_run(root, f"pair{seed}", flat(20 + seed), flat(22 + seed), seed=seed)
    write_run(root, "five", *[flat(50)] * 5, seed=3)
    return root


def rows(comparison, name):
    return list(csv.DictReader(csv_files(comparison)[name].decode().splitlines()))


@pytest.mark.slow
def test_the_files_are_these_and_nothing_is_left_half_written(runs, tmp_path):
    folder = tmp_path / "deep" / "out"
    assert write_comparison(compare([runs]), folder) == [folder / name for name in FILES]
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
    assert (folder / "comparison.png").read_bytes().startswith(b"\x89PNG")
    assert ET.parse(folder / "comparison.svg").getroot().tag.endswith("svg")


@pytest.mark.slow
def test_the_same_runs_give_the_same_files(runs, tmp_path):
    for name in "ab":
        write_comparison(compare([runs]), tmp_path / name)
    for name in FILES:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name


def lines(comparison, name):
    """A CSV file's lines by their second column, the cell; the head is under its name."""
    return {line.split(",")[1]: line for line in csv_files(comparison)[name].decode().splitlines()}


def test_one_row_for_each_cell(runs):
    found = lines(compare([runs]), "comparison.csv")
    std = str(math.sqrt(0.5))
    estimated = f"21.5,{std},21.5,21.0,22.0"
    assert list(found) == ["cell", "single", "DASE K=2", "DASE K=5"]
    assert found["cell"] == (
        "environment,cell,algorithms,method,agents,buffer,settings,runs,seeds,unfinished,step,final_mean,"
        "final_std,final_iqm,final_iqm_low,final_iqm_high,area_mean,area_std,area_iqm,area_iqm_low,"
        "area_iqm_high,best_mean,best_std,total_steps,equal_total_step,equal_total_mean,equal_total_std,"
        "equal_total_iqm,equal_total_iqm_low,equal_total_iqm_high"
    )
    assert found["DASE K=2"] == (
        "HalfCheetah-v5,DASE K=2,td3,dase,2,100000,train.method = dase; train.agents = 2,2,0 1,0,100000,"
        f"{estimated},{estimated},21.5,{std},100000,50000,{estimated}"
    )
    assert found["DASE K=5"].endswith("100000,50.0,,50.0,,,50.0,,50.0,,,50.0,,100000,20000,50.0,,50.0,,")


def test_one_row_for_each_published_point_that_all_runs_reach(runs):
    found = lines(compare([runs]), "published.csv")
    assert list(found) == ["cell", "single", "DASE K=2", "DASE K=5"]
    ours, theirs = f"21.5,{math.sqrt(0.5)}", "2566.82,195.01,HalfCheetah-v2,dase-k2,own,15/30"
    assert found["DASE K=2"] == f"HalfCheetah-v5,DASE K=2,2,50000,{ours},{theirs}"
    assert ",50000,50.0,," in found["DASE K=5"]
    assert found["DASE K=5"].endswith(",dase-k5,combination,")


def test_one_row_for_each_run(runs):
    found = rows(compare([runs]), "runs.csv")
    assert [(row["cell"], row["seed"], row["final"], row["area"]) for row in found] == [
        ("single", "0", "10.0", "10.0"),
        ("single", "1", "11.0", "11.0"),
        ("DASE K=2", "0", "21.0", "21.0"),
        ("DASE K=2", "1", "22.0", "22.0"),
        ("DASE K=5", "3", "50.0", "50.0"),
    ]
    assert found[2]["path"] == str(runs / "pair0")
    assert {row["finished"] for row in found} == {"true"}


def test_one_row_for_each_direction_of_each_pair_and_measure(runs):
    found = rows(compare([runs]), "pairs.csv")
    assert len(found) == 3 * 6
    wanted = [row for row in found if (row["measure"], row["x"], row["y"]) == ("final", "DASE K=2", "single")]
    assert [(row["probability_x_higher"], row["low"], row["high"]) for row in wanted] == [
        ("1.0", "1.0", "1.0")
    ]
    alone = next(row for row in found if row["x"] == "DASE K=5")
    assert (alone["runs_x"], alone["low"], alone["high"]) == ("1", "", "")


def test_without_pairs_their_table_has_its_columns_and_no_row(runs):
    whole, none = (csv_files(compare([path]))["pairs.csv"] for path in (runs, runs / "five"))
    assert none == whole.splitlines()[0] + b"\n"


def test_the_page_needs_nothing_beside_it_and_takes_its_colours_from_the_page(runs):
    text = sound(page(compare([runs])))
    assert "#0102" not in text  # the stand-ins that become the page's colours
    assert "var(--ink)" in text


def test_the_page_says_what_its_numbers_are_and_what_they_are_worth(runs):
    going = write_run(runs, "going", flat(1, 60), seed=9, steps=100_000)
    text = page(compare([runs])).replace("\u00a0", " ")
    for expected in (
        "One run is one sample: the agents of a run are averaged first",
        "95 % confidence interval by the percentile bootstrap over runs (10,000 resamples, seed 0)",
        "21.5 ± 0.7<br>IQM 21.5 [21.0, 22.0]†",
        "combination: carries no information of its own",
        "own; rank 15/30",
        "2,566.8 ± 195.0",
        "Gym v2 and v3 with MuJoCo 1.50",
        "a comparison, not a target",
        "At equal total steps, 100,000 of all agents",
        "1 run, so no interval:<br>  HalfCheetah-v5: DASE K=5",
        f"{going} is left out: it has not finished",
    ):
        assert expected in text, expected


@pytest.mark.slow
def test_an_unfinished_run_is_marked_where_it_is_used(runs):
    write_run(runs, "going", flat(1, 61), seed=9, steps=100_000)
    comparison = compare([runs], unfinished=True)
    text = page(comparison)
    assert ">3 (1 unfinished)<" in text
    assert ">60,000 (unfinished)<" in text
    assert [row["finished"] for row in rows(comparison, "runs.csv")] == ["true"] * 2 + ["false"] + [
        "true"
    ] * 3


def test_what_a_user_wrote_is_escaped(tmp_path):
    write_run(
        tmp_path, "a", flat(1), settings={"env": {"id": "<script>x</script>:Y", "kwargs": {"$k": "</b>"}}}
    )
    assert "&lt;script&gt;" in sound(page(compare([tmp_path])))


def test_names_may_have_control_characters_and_such_as_the_font_lacks(tmp_path):
    env = {"id": "a\x01b\x1b:Y", "kwargs": {"$k": "漢字", "b": "\x02"}}
    write_run(tmp_path, "a", flat(1, 3), settings={"env": env})
    comparison = compare([tmp_path])
    for text in (sheet(comparison, inks=PRINT).svg_file().decode(), sound(page(comparison))):
        assert ET.fromstring(text[text.index("<svg") :].partition("</svg>")[0] + "</svg>") is not None
        assert "a\ufffdb\ufffd:Y" in text
        assert "漢字" in text
        assert not {"\x01", "\x02", "\x1b"} & set(text)
    assert sheet(comparison, inks=PRINT).png_file().startswith(b"\x89PNG")


def test_a_folder_that_cannot_be_made_is_one_sentence(runs, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirectoryError, match=r"cannot write into .*file"):
        write_comparison(compare([runs]), tmp_path / "file")


# -- the picture ---------------------------------------------------------------------------------------


def test_each_environment_has_a_panel_by_agent_and_one_in_total(runs):
    write_run(runs, "ant", flat(1), settings={"env": {"id": "Ant-v5"}})
    drawn = sheet(compare([runs]), inks=PRINT)
    assert len(drawn.axes) == len(drawn.figure.axes) == 4
    assert [axis.get_title("left") for axis in drawn.axes] == ["Ant-v5", "", "HalfCheetah-v5", ""]
    assert [axis.get_xlabel() for axis in drawn.axes] == [
        "environment steps of each agent",
        "environment steps of all agents together",
    ] * 2


@pytest.mark.parametrize(("environments", "shape"), [(1, (1, 2)), (3, (3, 2)), (4, (2, 4)), (5, (3, 4))])
def test_many_environments_become_a_grid(tmp_path, environments, shape):
    for index in range(environments):
        write_run(tmp_path, str(index), flat(1), settings={"env": {"id": f"Some{index}-v0"}})
    drawn = sheet(compare([tmp_path]))
    grid = drawn.axes[0].get_subplotspec()
    assert grid is not None
    assert (grid.get_gridspec().nrows, grid.get_gridspec().ncols) == shape
    assert len(drawn.figure.axes) == 2 * environments


def test_curves_are_smoothed_means_with_half_a_deviation_and_total_steps_are_k_times_as_many(
    tmp_path,
):
    rng = np.random.default_rng(0)
    curves = rng.normal(size=(3, 2, 101))
    for seed, (first, second) in enumerate(curves):
        write_run(tmp_path, str(seed), first.tolist(), second.tolist(), seed=seed)
    by_agent, in_total = sheet(compare([tmp_path])).axes
    line, band = by_agent.get_lines()[0], by_agent.collections[0]
    of_runs = smoothed(curves.mean(axis=1))
    np.testing.assert_allclose(line.get_ydata(), of_runs.mean(axis=0))
    steps = np.arange(101) * 1_000
    np.testing.assert_array_equal(line.get_xdata(), steps)
    np.testing.assert_array_equal(in_total.get_lines()[0].get_xdata(), 2 * steps)
    high = band.get_paths()[0].vertices[:, 1].max()
    assert high == pytest.approx((of_runs.mean(axis=0) + of_runs.std(axis=0, ddof=1) / 2).max())


def test_short_curves_are_not_smoothed_away(tmp_path):
    write_run(tmp_path, "run", [0, 100] * 10)
    np.testing.assert_array_equal(
        sheet(compare([tmp_path])).axes[0].get_lines()[0].get_ydata(), [0, 100] * 10
    )


def test_a_long_curve_beside_a_short_one_is_not_smoothed(tmp_path):
    steps = list(range(101))
    write_run(tmp_path, "long", steps)
    write_run(tmp_path, "short", [0, 1], [2, 3])
    drawn = {line.get_label(): line for line in sheet(compare([tmp_path])).axes[0].get_lines()}
    np.testing.assert_array_equal(drawn["single"].get_ydata(), steps)


def test_a_cell_has_its_colour_in_every_panel_and_published_points_have_it_too(runs):
    ant = {"env": {"id": "Ant-v5"}}
    write_run(runs, "antpair", flat(1), flat(1), settings=ant)
    write_run(runs, "antfive", *[flat(1)] * 5, settings=ant)
    drawn = sheet(compare([runs]), inks=PRINT)
    colours = {}
    for axis in drawn.axes:
        handles, labels = axis.get_legend_handles_labels()
        for handle, label in zip(handles, labels, strict=True):
            line = handle[0] if isinstance(handle, tuple) else handle
            colours.setdefault(label, set()).add(str(line.get_color()))
    assert colours["DASE K=2"] == colours["published: DASE K=2"] == {PALETTE[0]}
    assert colours["DASE K=5"] == colours["published: DASE K=5 (combination)"] == {PALETTE[1]}
    assert colours["single"] == {PALETTE[2]}


def test_a_line_stands_where_the_comparison_ends_before_the_curves_do(runs):
    by_agent, in_total = sheet(compare([runs])).axes
    assert "compared up to here" not in by_agent.get_legend_handles_labels()[1]
    handles, labels = in_total.get_legend_handles_labels()
    assert list(handles[labels.index("compared up to here")].get_xdata()) == [100_000, 100_000]


def test_published_points_are_solid_or_hollow(runs):
    by_agent, in_total = sheet(compare([runs]), inks=PRINT).axes
    faces = {
        label: handle[0].get_markerfacecolor()
        for handle, label in zip(*by_agent.get_legend_handles_labels(), strict=True)
        if label.startswith("published")
    }
    assert faces["published: DASE K=5 (combination)"] == PRINT.paper
    assert faces["published: single"] in PALETTE
    assert not [label for label in in_total.get_legend_handles_labels()[1] if label.startswith("published")]


def test_dollar_signs_in_names_are_no_mathematics() -> None:
    sheet = Sheet(1)
    sheet.axes[0].set_title("data/$HOME_$USER")
    sheet.axes[0].plot([0, 1], [0, 1], label="$A_$B")
    drawn = sheet.svg()
    assert "data/$HOME_$USER" in drawn
    assert "$A_$B" in drawn
