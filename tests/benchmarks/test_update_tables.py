"""What update_floor.py measured becomes a file, and the tables that docs/performance.md shows."""

import pytest


@pytest.fixture
def floor(script):
    return script("update_floor")


def subjects_of(floor, *, beside):
    flops = 2.0 * floor.SQUARE**3
    known = {"product": flops, "product by NumPy": flops}
    named = [*known, *(f"{kind} {way}" for kind in ("td3", "ddpg", "sac") for way in floor_ways())]
    named += ["td3 step", "td3 step, external vanish", "act", "act by torch", "td3 bfloat16", *beside]
    counted = {name: 4 * flops for name in named if name.split()[-1] in ("autograd", "passes", "out")}
    return [floor.Subject(name, lambda: None, known.get(name, counted.get(name))) for name in named]


def floor_ways():
    return ("autograd", "passes", "left out")


def test_times_become_ratios_of_rounds_and_of_the_best_round(floor, tmp_path):
    subjects = subjects_of(floor, beside=["authors td3"])
    times = {subject.name: [10.0, 10.0, 10.0] for subject in subjects}
    times["td3 passes"] = [48.0, 60.0, 64.0]  # the floor is 4 products
    times["td3 bfloat16"] = [24.0, 60.0, 16.0]
    times["authors td3"] = [104.0, 90.0, 64.0]
    found = floor.figures(subjects, times, 0.25)
    passes = next(each for each in found if each.what == "td3 passes")
    assert (passes.floor, passes.floor_best) == (1.5, 1.2)
    assert (passes.authors, passes.authors_best) == (1.5, pytest.approx(64 / 48))
    assert (passes.cleanrl, passes.float32) == (None, None)
    rounded = next(each for each in found if each.what == "td3 bfloat16")
    assert (rounded.float32, rounded.float32_best) == (2.0, pytest.approx(48 / 16))
    floor.write_timed(tmp_path / "new/file.csv", found)
    assert floor.read_timed(tmp_path / "new/file.csv") == found
    lines = [line.strip("| ").split(" | ") for line in floor.tables(found).splitlines()]
    td3 = next(line for line in lines if line[0] == "TD3")
    assert td3[1:-1] == ["134", "0.04 ms", "0.06 ms", "0.05 ms", "1.50", "1.20"]
    assert td3[-1] == "1.25: by the best rounds, not by the median"
    assert ["our update, every row counted", "0.06 ms", "0.05 ms", "1.50 (1.33)"] in lines


def test_a_comparison_without_a_copy_of_the_other_code_is_said_to_be_left_out(floor):
    subjects = subjects_of(floor, beside=[])
    text = floor.tables(floor.figures(subjects, {each.name: [1.0] for each in subjects}, 0.0))
    assert "not measured, for no copy of either was given" in text
    assert "| our step, every row counted | 0.00 ms | 0.00 ms |\n" in text
