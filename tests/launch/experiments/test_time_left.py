"""How long an experiment is said to take; its processes' start-up is no training speed."""

from launch.experiment_cases import small_cells

from dase_grpc.launch.experiments.scoreboard import ExperimentTimeLeft

CELLS = {cell.name: cell for cell in small_cells(seed=[0, 1, 2], settings={"train.steps": 1_000})}
A, B, C = CELLS.values()


def left(estimate, *running, waiting=()):
    """The estimate while cells run, given as (cell, step), and others wait."""
    steps = {cell.name: step for cell, step in running}
    cells = {**{cell.name: cell for cell, _ in running}, **{cell.name: cell for cell in waiting}}
    seconds = estimate.estimate(steps, cells)
    return seconds if seconds is None else round(seconds, 6)


def started(*cells, step=0, now=0.0):
    estimate = ExperimentTimeLeft()
    for cell in cells:
        estimate.started(cell, step, now)
    return estimate


def test_the_time_before_the_first_step_is_no_training_speed():
    estimate = started(A)
    for now, step in ((30, 0), (40, 100), (60, 300)):
        estimate.observe(A, step, now)
    assert left(estimate, (A, 300)) == 70  # 10 steps a second, though 60 s are over


def test_nothing_is_known_before_a_cell_has_been_seen_to_train_for_a_while():
    estimate = started(A)
    assert left(estimate, (A, 0)) is None
    estimate.observe(A, 100, 50)
    assert left(estimate, (A, 100)) is None
    estimate.observe(A, 150, 55)
    assert left(estimate, (A, 150)) is None
    estimate.observe(A, 200, 60)
    assert left(estimate, (A, 200)) == 80


def test_random_steps_at_the_beginning_say_nothing_about_the_rest():
    (cell,) = small_cells(settings={"agent.start_steps": 500, "train.steps": 1_000})
    estimate = started(cell)
    for now, step in ((10, 100), (20, 499)):
        estimate.observe(cell, step, now)
    assert left(estimate, (cell, 499)) is None
    for now, step in ((22, 500), (32, 510)):
        estimate.observe(cell, step, now)
    assert left(estimate, (cell, 510)) == 490


def test_each_running_cell_has_its_own_speed_and_the_slowest_decides():
    estimate = started(A, B)
    for now in (10, 20):
        estimate.observe(A, 10 * now, now)
        estimate.observe(B, 40 * now, now)
    assert left(estimate, (A, 200), (B, 800)) == 80


def test_a_cell_that_waits_takes_its_turn_with_a_start_of_its_own():
    estimate = started(A, B)
    for cell in (A, B):
        for now, step in ((20, 100), (40, 300)):
            estimate.observe(cell, step, now)
    assert left(estimate, (A, 300), (B, 300), waiting=[C]) == 70 + 20 + 100


def test_cells_that_have_finished_say_best_how_long_those_take_that_wait():
    estimate = started(A, B)
    estimate.observe(A, 1_000, 150)
    estimate.ended(A, took_s=150)
    assert left(estimate, waiting=[C]) == 150
    assert left(estimate, (B, 0), waiting=[C]) == 150  # side by side, as before


def test_a_resumed_cell_has_not_made_the_steps_that_it_goes_on_from():
    estimate = started(A, step=500)
    for now, step in ((10, 500), (30, 600), (40, 700)):
        estimate.observe(A, step, now)
    assert left(estimate, (A, 700)) == 30
    estimate.observe(A, 1_000, 70)
    estimate.ended(A, took_s=70)
    assert left(estimate, waiting=[C]) == 100 + 30  # as fast as it trained, after a start like its own
