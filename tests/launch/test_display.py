import io
import re
from dataclasses import replace

import pytest
from rich.console import Console
from small import small_config

from dase_grpc.config.resolve import resolve
from dase_grpc.launch.display import (
    LiveTable,
    PlainLines,
    Snapshot,
    StepPace,
    TimeLeft,
    left,
    make_display,
)
from dase_grpc.progress import Progress

EXPLORING = Progress(
    step=100,
    total_steps=1_000,
    first_evaluation_return=-10.5,
    evaluation_return=-10.5,
    state="exploring",
)
TRAINING = Progress(
    step=400,
    total_steps=1_000,
    updates=300,
    updates_per_second=91.4,
    episode_return=-3.25,
    first_evaluation_return=-10.5,
    evaluation_return=-2.0,
    similarity={0: 1.0, 1: 0.21, 2: 3e-05},
    similarity_weight=0.05,
    state="training",
)
FINISHED = replace(TRAINING, step=1_000, updates=900, evaluation_return=-0.5, state="finished")


class Screen:
    def __init__(self, kind, *, terminal=False, width=120, config=None):
        self.now = 0.0
        self.console = Console(
            file=io.StringIO(), force_terminal=terminal, width=width, height=40, color_system=None
        )
        self.display = kind(self.console, config or small_config(train__steps=1_000), lambda: self.now)

    def show(self, *agents, at, size=500, capacity=1_000):
        self.now = at
        self.display.show(Snapshot(agents, size, capacity))

    def lines(self):
        text = self.console.file.getvalue()
        self.console.file.seek(0)
        self.console.file.truncate()
        return text.splitlines()


# -- time left ----------------------------------------------------------------------------------------


def observed(*points, total=1_000, states=()):
    """Points are (seconds, step of agent 0, step of agent 1); states those of agent 0, else "training"."""
    estimate = TimeLeft(total)
    for index, (now, *steps) in enumerate(points):
        state = states[index] if index < len(states) else "training"
        agents = [
            None if step is None else Progress(step=step, total_steps=total, state="training" if i else state)
            for i, step in enumerate(steps)
        ]
        estimate.observe(Snapshot(agents, 0, 0), now)
    return str(estimate)


TIMES = {
    "of the slowest agent": ([(0, 0, 0), (10, 500, 100)], (), "about 1 min 30 s left"),
    "by the last minute and not the quick start": (
        [(0, 0), (10, 400), (20, 410), (80, 470)],
        (),
        "about 8 min 50 s left",
    ),
    "without frequent looks": ([(0, 0), (100, 100), (200, 200)], (), "about 13 min 20 s left"),
    "from when all train": (
        [(0, 0, 0), (10, 500, 600), (10.5, 510, 610), (11, 515, 612), (20.5, 610, 700)],
        ("exploring", "exploring", "training"),
        "about 39 s left",
    ),
    "all done": ([(0, 0, 0), (10, 1_000, 1_000)], (), "all steps done"),
}
UNKNOWN = [
    ([(0, 0)], ()),
    ([(0, 0), (5, 0)], ()),
    ([(3, 0), (3, 5)], ()),
    ([(0, 0, None), (9, 9, None)], ()),
    ([(0, 0, 0), (10, 500, 600)], ("starting", "exploring")),
    ([(0, 0, 0), (10, 500, 600), (20, 900, 950)], ("exploring",) * 3),
    ([(0, 0, 0), (10, 500, 600), (10.5, 510, 610), (11, 515, 612)], ("exploring", "exploring", "training")),
]


@pytest.mark.parametrize(("points", "states", "told"), TIMES.values(), ids=TIMES.keys())
def test_the_time_left_is_estimated(points, states, told):
    assert observed(*points, states=states) == told


@pytest.mark.parametrize(("points", "states"), UNKNOWN)
def test_time_left_is_not_known_without_progress_of_all_or_while_an_agent_explores_at_random(points, states):
    assert observed(*points, states=states) == "time left not known yet"


def test_a_pace_is_not_known_before_it_was_measured_for_long_enough():
    pace = StepPace()
    assert (pace.step, pace.since_s, pace.step_s(measured_s=0)) == (-1, None, None)
    pace.observe(100, 5.0)
    assert (pace.step, pace.since_s, pace.step_s(measured_s=0)) == (100, 5.0, None)
    pace.observe(120, 15.0)
    assert (pace.step_s(measured_s=10), pace.step_s(measured_s=10.1)) == (0.5, None)


@pytest.mark.parametrize(("horizon_s", "first"), [(60.0, 940.0), (float("inf"), 0.0)])
def test_a_pace_reaches_back_as_far_as_its_horizon_in_bounded_memory(horizon_s, first):
    pace = StepPace(horizon_s)
    for tick in range(10_001):
        pace.observe(tick, tick / 10)
    assert pace.since_s == pytest.approx(first, abs=1.1)
    assert pace.step_s(measured_s=1) == pytest.approx(0.1)
    assert len(pace._seen) <= 122


def test_the_time_left_is_a_few_words():
    assert [left(None), left(130.0)] == ["time left not known yet", "about 2 min 10 s left"]


# -- plain lines --------------------------------------------------------------------------------------


def test_no_terminal_gets_plain_lines_and_a_terminal_gets_the_table():
    config = small_config()
    assert isinstance(make_display(Console(file=io.StringIO()), config), PlainLines)
    assert isinstance(make_display(Console(file=io.StringIO(), force_terminal=True), config), LiveTable)


def test_nothing_is_said_before_an_agent_has_told_something():
    screen = Screen(PlainLines)
    screen.show(None, Progress(), at=30)
    assert screen.lines() == []


def test_an_agents_first_evaluation_is_said_at_once_for_that_agent_only():
    screen = Screen(PlainLines)
    screen.show(EXPLORING, None, at=1)
    assert screen.lines() == [
        "agent 0: step 100 of 1,000, return -, evaluation -10.5 (first -10.5), - updates/s, exploring"
    ]
    screen.show(replace(EXPLORING, step=150, evaluation_return=-9.0), None, at=2)
    assert screen.lines() == []
    screen.show(replace(EXPLORING, step=160), TRAINING, at=3)
    (line,) = screen.lines()
    assert line.startswith("agent 1: step 400 of 1,000, return -3.2, evaluation -2.0")


def test_every_twenty_seconds_all_agents_and_the_buffer_are_said():
    screen = Screen(PlainLines)
    before = replace(TRAINING, step=100)
    screen.show(before, before, at=1)
    screen.lines()
    later = replace(TRAINING, step=200)
    screen.show(later, later, at=11)
    assert screen.lines() == []
    screen.show(later, later, at=21)
    first, second, footer = screen.lines()
    assert first.startswith("agent 0: step 200 of 1,000, return -3.2, evaluation -2.0, 91 updates/s")
    assert second.startswith("agent 1: step 200")
    assert footer == "buffer 500 of 1,000 (50%), about 2 min 40 s left"


def test_a_quick_start_of_80_seconds_with_two_agents_is_told_in_under_20_lines():
    screen = Screen(PlainLines)
    screen.show(None, None, at=0)
    for tick in range(1, 161):
        each = replace(TRAINING, step=6 * tick, evaluation_return=float(tick // 8))
        screen.show(each, each, at=tick / 2)
    screen.show(FINISHED, FINISHED, at=81)
    lines = screen.lines()
    assert len(lines) < 20
    firsts = ["(first" in line for line in lines if line.startswith("agent 0")]
    assert firsts == [True, False, False, False, False, True]


def test_what_has_been_said_is_not_said_again():
    screen = Screen(PlainLines)
    for now in range(0, 60, 5):
        screen.show(EXPLORING, at=now)
    assert len(screen.lines()) == 1


def test_the_end_is_said_at_once_and_once():
    screen = Screen(PlainLines)
    screen.show(TRAINING, TRAINING, at=1)
    screen.lines()
    screen.show(FINISHED, replace(TRAINING, step=990), at=2)
    assert [line.split(":")[0] for line in screen.lines()] == ["agent 0"]
    screen.show(FINISHED, FINISHED, at=3)
    last, footer = screen.lines()
    assert last.endswith("finished")
    assert footer.endswith("all steps done")
    screen.show(FINISHED, FINISHED, at=30)
    assert screen.lines() == []


def test_what_a_service_says_is_not_taken_for_markup_nor_broken_where_the_output_is_narrow():
    screen = Screen(PlainLines, width=40)
    screen.show(replace(TRAINING, state="waiting: for [bold]5[/bold] more"), at=1)
    (line,) = screen.lines()
    assert line.endswith("waiting: for [bold]5[/bold] more")


# -- the table ----------------------------------------------------------------------------------------


def table_of(*agents, at=5.0, **options):
    screen = Screen(LiveTable, terminal=True, **options)
    with screen.display as display:
        screen.show(None, None, at=0)
        screen.show(*agents, at=at)
        assert display is screen.display
    return "\n".join(screen.lines())


def test_the_table_has_a_line_per_agent_and_the_buffer_below():
    text = table_of(TRAINING, None)
    lines = [re.sub(r"\x1b\[[\d?]*\w", "", line) for line in text.splitlines()[-5:-1]]
    titles, first, second, footer = (re.sub(" +", " ", line).strip() for line in lines)
    assert titles == "agent step return evaluation first updates/s similarity λ state"
    assert first == "0 400 -3.2 -2.0 -10.5 91 0.05 (1:0.21 2:3e-05) training"
    assert second == "1 - - - - - - starting"
    assert footer == "1,000 steps each, buffer 500 of 1,000 (50%), time left not known yet"


def test_nothing_is_cut_off_on_80_columns():
    cheetah = replace(
        TRAINING,
        step=100_000,
        episode_return=-1_234.5,
        first_evaluation_return=-1_234.5,
        evaluation_return=-1_234.5,
        similarity={0: 1.0, 1: 3.1e-07},
        similarity_weight=3.1e-07,
        state="exploring",
    )
    text = table_of(cheetah, replace(cheetah, state="waiting: for 25,000 more transitions"), width=80)
    assert "…" not in text
    assert "100,000" in text


def test_the_last_table_stays_on_the_screen_and_the_cursor_comes_back():
    screen = Screen(LiveTable, terminal=True)
    with screen.display:
        screen.show(TRAINING, at=0)
        screen.show(FINISHED, at=10)
    text = "\n".join(screen.lines())
    assert "all steps done" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


def test_the_table_ends_although_the_block_raises():
    screen = Screen(LiveTable, terminal=True)
    with pytest.raises(ZeroDivisionError), screen.display:
        screen.show(TRAINING, at=1 / 0)
    assert "\x1b[?25h" in screen.console.file.getvalue()


def test_a_similarity_stays_beside_its_agent_on_80_columns():
    similarity = dict.fromkeys(range(4), 1.2e-05)
    text = table_of(*[replace(TRAINING, step=100_000, similarity=similarity)] * 4, width=80)
    assert len(re.findall(r"[0-3]:1\.2e-05", text)) == 4 * 3
    assert "29" in table_of(*[TRAINING] * 30)


def test_a_single_agent_has_no_similarity():
    alone = replace(TRAINING, similarity={0: 1.0}, similarity_weight=None)
    text = table_of(alone, config=small_config(train__agents=1, train__steps=1_000))
    assert "similarity" not in text
    assert "training" in text
    assert "1,000 steps, buffer" in text.splitlines()[-2]  # not each
    screen = Screen(PlainLines, config=small_config(train__agents=1, train__steps=1_000))
    screen.show(alone, at=1)
    assert screen.lines() == [
        "agent 0: step 400 of 1,000, return -3.2, evaluation -2.0 (first -10.5), 91 updates/s, training"
    ]


# -- mixed ensembles ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        (PlainLines, r"^agent 1 \(SAC\): step 1,000 of 1,000, return"),
        (LiveTable, r"^1 \(SAC\) +1,000 "),
    ],
)
def test_the_agents_of_a_mixed_ensemble_are_shown_with_their_algorithms(kind, row):
    members = [{"algorithm": "td3"}, {"algorithm": "sac"}]
    screen = Screen(kind, config=resolve({"train": {"steps": 1_000}, "members": members}))
    with screen.display:
        screen.show(FINISHED, FINISHED, at=1.0)
    assert any(re.search(row, line.strip()) for line in screen.lines())
