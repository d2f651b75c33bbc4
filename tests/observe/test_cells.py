"""An agent's numbers as texts."""

from dataclasses import replace

import pytest
from observe.clusters import agent

from dase_grpc.observe.tables import agent_cells, buffer_text, rate, similarity_text
from dase_grpc.observe.top import sparkline
from dase_grpc.progress import Progress, ago, duration, evaluation_line, number

TRAINING = replace(agent(0).progress, similarity={0: 1.0, 1: 0.21, 2: 3e-05})
UNKNOWN = ("-",) * 5


@pytest.mark.parametrize(
    ("progress", "cells"),
    [
        (None, ("-", *UNKNOWN, "starting")),
        (Progress(), ("-", *UNKNOWN, "starting")),
        (Progress(total_steps=5_000), ("0", *UNKNOWN, "starting")),  # it evaluates for the first time
        (TRAINING, ("400", "-3.2", "-2.0", "-10.5", "91", "0.05 (1:0.21  2:3e-05)", "training")),
    ],
)
def test_an_agent_is_told_in_cells_as_far_as_it_has_told_anything(progress, cells):
    assert tuple(agent_cells(0, progress).values()) == cells


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0.04, "0.0"), (-1234.56, "-1,234.6"), (9.9e6, "9,900,000.0"), (1e300, "1e+300")],
)
def test_numbers_are_short(value, text):
    assert number(value) == text


def test_similarity_leaves_out_the_own_rows_and_many_others():
    similarity = {agent_id: agent_id / 10 for agent_id in range(10)}
    assert similarity_text(1, Progress(similarity=similarity, similarity_weight=0.25)) == (
        "0.25 (0:0  2:0.2  3:0.3  4:0.4  5:0.5  6:0.6  ...)"
    )


def test_similarity_is_the_weight_that_is_used_alone_where_it_is_that_of_the_only_peer():
    assert similarity_text(0, Progress(similarity={0: 1.0, 1: 0.21}, similarity_weight=0.21)) == "0.21"
    assert similarity_text(0, Progress(similarity={0: 1.0})) == "-"
    assert similarity_text(0, Progress(similarity={0: 1.0}, similarity_weight=0.0)) == "0"


def test_a_weight_that_can_change_nothing_is_shown_as_that():
    tiny = Progress(similarity={1: 2.9e-14, 2: 3e-8}, similarity_weight=2.9e-14)
    assert similarity_text(0, tiny) == "<1e-09 (1:<1e-09  2:3e-08)"
    assert evaluation_line(tiny).endswith("λ <1e-09")


@pytest.mark.parametrize(
    ("size", "capacity", "text"),
    [
        (0, 0, " not open yet"),
        (1_500, 6_000, " 1,500 of 6,000 (25%)"),
        (0, 6_000, " 0 of 6,000 (0%)"),
        (6_000, 6_000, " 6,000 of 6,000 (100%)"),
        (2, 1_000_000, " 2 of 1,000,000 (<1%)"),
        (999_999, 1_000_000, " 999,999 of 1,000,000 (>99%)"),
    ],
)
def test_the_buffer_is_empty_where_it_holds_nothing_and_full_where_no_more_fits(size, capacity, text):
    assert buffer_text(size, capacity) == f"buffer{text}"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59.4, "59 s"), (59.6, "1 min 0 s"), (130, "2 min 10 s"), (7_320, "2 h 2 min")],
)
def test_durations_are_read_at_a_glance(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("per_second", "text"),
    [(None, "-"), (0.0, "0"), (0.04, "0.0"), (9.9, "9.9"), (9.96, "10"), (1e4, "10,000")],
)
def test_rates_have_a_decimal_where_they_are_few(per_second, text):
    assert rate(per_second) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0.04, "0.0 s"), (12.4, "12 s"), (119.0, "119 s"), (600, "10 min"), (1e5, "28 h")]
)
def test_how_long_ago_something_was_is_told_in_a_few_characters(value, text):
    assert ago(value) == text


def test_a_sparkline_is_full_at_its_highest_value_and_blank_where_nothing_is_known():
    assert sparkline([0.0, 1.0, None, 7.9, 8.0], 10) == "▁▂ ██"
    assert sparkline([0.0, 0.0], 10) == "▁▁"
    assert sparkline([], 10) == ""
    assert sparkline([None], 10) == " "


def test_a_sparkline_of_more_values_than_characters_draws_means_the_latest_in_full():
    assert sparkline([4.0, 8.0, 8.0, 0.0, 0.0], 3) == "▅█▁"
    assert len(sparkline([1.0] * 60, 25)) <= 25
