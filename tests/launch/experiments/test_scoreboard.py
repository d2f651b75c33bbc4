"""What a person sees of an experiment."""

import io

import pytest
from launch.experiment_cases import small_cells
from rich.console import Console

from dase_grpc.launch.experiments.folder import Reading
from dase_grpc.launch.experiments.scoreboard import PLAIN_EVERY_S, REDRAW_S, Outcome, Scoreboard


class Screen:
    def __init__(self, *, terminal: bool = False, done: int = 0) -> None:
        self.now = 0.0
        self.readings: dict[str, Reading] = {}
        self.cells = small_cells(seed=[0, 1, 2])
        self.console = Console(
            file=io.StringIO(), force_terminal=terminal, width=100, height=40, color_system=None
        )
        self.board = Scoreboard(
            self.console,
            self.cells,
            done=done,
            read=lambda cell: self.readings.get(cell.name, Reading()),
            clock=lambda: self.now,
        )

    def lines(self) -> list[str]:
        text = self.console.file.getvalue()
        self.console.file.seek(0)
        self.console.file.truncate()
        return text.splitlines()


def test_plain_lines_tell_beginnings_ends_and_now_and_then_where_all_stand():
    screen = Screen(done=2)
    first, second, _ = screen.cells
    screen.board.started(first)
    screen.board.started(second)
    assert screen.lines() == ["seed-0: started", "seed-1: started"]
    screen.now = 20.0
    screen.readings = {"seed-0": Reading(120, -1.5), "seed-1": Reading(60)}
    screen.board.ended(first, Outcome("finished", 20.0))
    screen.board.show()
    assert screen.lines() == [
        "seed-0: finished after 20 s, evaluation -1.5",
        "3 of 5 cells finished, 1 running, 1 waiting; about 20 s left",
    ]
    screen.board.ended(second, Outcome("failed", 20.0, "exit code 1, the gear is stuck"))
    screen.board.show()
    assert screen.lines() == [
        "seed-1: failed after 20 s: exit code 1, the gear is stuck",
        "3 of 5 cells finished, 0 running, 1 waiting, 1 failed; about 20 s left",
    ]


@pytest.mark.parametrize(("now", "step"), [(9.0, 60), (60.0, 0)], ids=["too early", "no step yet"])
def test_no_time_left_is_told_before_anything_is_known(now, step):
    screen = Screen()
    screen.board.started(screen.cells[0])
    screen.now, screen.readings = now, {"seed-0": Reading(step)}
    screen.board.show()
    assert screen.lines()[-1].endswith("time left not known yet")


def test_a_table_shows_each_running_cell_and_goes_when_all_is_over():
    screen = Screen(terminal=True)
    with screen.board:
        screen.board.started(screen.cells[0])
        screen.now, screen.readings = 65.0, {"seed-0": Reading(60, -3.0)}
        screen.lines()
        screen.board.show()
        drawn = "\n".join(screen.lines())
        for text in ("running", "seed-0", "60 of 120", "-3.0", "1 min 5 s", "1 running, 2 waiting"):
            assert text in drawn
        screen.board.ended(screen.cells[0], Outcome("finished", 65.0))
        assert "seed-0: finished after 1 min 5 s" in "\n".join(screen.lines())
    assert "\x1b[?25h" in "\n".join(screen.lines())  # the cursor is back


def test_nothing_is_drawn_between_two_shows():
    screen = Screen(terminal=True)
    with screen.board:
        screen.lines()
        assert screen.board._live is not None
        assert not screen.board._live.auto_refresh
    assert screen.board.every_s == REDRAW_S >= 0.5
    assert Screen().board.every_s == PLAIN_EVERY_S


def test_what_looks_like_markup_is_shown_as_it_is():
    screen = Screen()
    screen.board.say("failed: [red]1[/red]")
    assert screen.lines() == ["failed: [red]1[/red]"]
