"""benchmarks/soak.py finds what grows, and nothing where all is level."""

import csv

import numpy as np
import pytest


@pytest.fixture
def soak(script):
    return script("soak")


def test_the_slope_and_its_error_are_those_of_least_squares(soak):
    seconds = np.arange(0.0, 3_600.0, 5.0)
    measured = 7.0 + 2.0 * seconds / 3_600 + np.random.default_rng(1).normal(0.0, 0.5, len(seconds))
    found = soak.slope_of(seconds, measured)
    (per_hour, _), covariance = np.polyfit(seconds / 3_600, measured, 1, cov=True)
    assert found.per_hour == pytest.approx(per_hour)
    assert found.error == pytest.approx(np.sqrt(covariance[0, 0]))
    assert abs(found.per_hour - 2.0) < 4 * found.error


def looked(path, soak, *, leak=None):
    """Looks of an hour at a replay and a learner, level but for noise; one thing may grow."""
    rng = np.random.default_rng(2)
    with path.open("w", newline="") as file:
        lines = csv.DictWriter(file, soak.FIELDS)
        lines.writeheader()
        for second in range(0, 3_600, 10):
            for process in ("replay", "learner 0"):
                level = dict.fromkeys(soak.MEASURED, 20.0)
                level["rss_mib"] += rng.normal(0, 0.1) + 50.0 * min(1.0, second / 300)  # it warms up
                if leak and leak[0] == process:
                    level[leak[1]] += leak[2] * second / 3_600
                lines.writerow({"seconds": second, "process": process, "passes": second / 100, **level})
    return path


def test_a_level_hour_grows_nowhere(soak, tmp_path):
    lines = list(soak.report(looked(tmp_path / "looks.csv", soak), warm_up_s=300))
    assert not any(grows for _, grows in lines)
    assert "from 300 s on (every slot of the buffer had been written after 100 s)" in lines[0][0]


@pytest.mark.parametrize(
    "leak",
    [
        ("replay", "rss_mib", 3.0),
        ("replay", "anonymous_mib", 2.0),
        ("replay", "descriptors", 2.0),
        ("replay", "streams", 2.0),
        ("learner 0", "threads", 2.0),
        ("learner 0", "queued", 200.0),
    ],
)
def test_each_leak_is_found_where_it_is(soak, tmp_path, leak):
    lines = list(soak.report(looked(tmp_path / "looks.csv", soak, leak=leak), warm_up_s=300))
    assert [line.split(" | ")[:2] for line, grows in lines if grows] == [[f"| {leak[0]}", leak[1]]]


def test_the_warm_up_does_not_count(soak, tmp_path):
    lines = list(soak.report(looked(tmp_path / "looks.csv", soak), warm_up_s=0))
    assert any(grows for _, grows in lines)


def test_too_few_looks_are_no_slope(soak, tmp_path):
    with pytest.raises(SystemExit, match="run longer"):
        list(soak.report(looked(tmp_path / "looks.csv", soak), warm_up_s=3_550))
