"""A durable replay that is killed under writers at full speed loses nothing that it has acknowledged."""

import asyncio
import os
from dataclasses import replace

import numpy as np
import pytest
from patience import PATIENCE_S

KILLS = int(os.environ.get("DASE_STORM_KILLS", "5"))
CAPACITY = 20_000


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.timeout(PATIENCE_S * (1 + KILLS))
def test_a_replay_that_is_killed_again_and_again_loses_nothing_it_acknowledged(storm, tmp_path):
    run = storm.Storm(storm.free_address(), tmp_path / "data", CAPACITY)
    asyncio.run(storm.run_storm(run, kills=KILLS, writers=2, every_s=0.4, seed=KILLS))
    assert len(run.restart_s) == KILLS
    assert sum(writer.connections for writer in run.writers) > KILLS
    assert sum(writer.acknowledged for writer in run.writers) > CAPACITY


class TestTheCheck:
    """It would find each way in which a buffer can be wrong."""

    @pytest.fixture
    def files(self, storm):
        """Six transitions of two writers, of which a buffer of four holds the latest."""
        rows = np.concatenate([storm.rows_of(0, np.array([2, 3])), storm.rows_of(1, np.array([2, 3]))])
        return storm.Files(6, rows, {(0, "storm"): 3, (1, "storm"): 3})

    WRITERS = {0: (3, 3), 1: (2, 4)}  # noqa: RUF012 - a constant

    def test_it_takes_a_buffer_that_is_right(self, storm, files):
        storm.check(files, self.WRITERS, 4)

    @pytest.mark.parametrize(
        "wrong",
        [
            lambda files: replace(files, sequences={(0, "storm"): 2, (1, "storm"): 3}),
            lambda files: replace(files, sequences={(0, "storm"): 3, (1, "storm"): 5}),
            lambda files: replace(files, total=7),
            lambda files: replace(files, rows=files.rows[:3]),
            lambda files: replace(files, rows=files.rows[[0, 1, 2, 2]]),
            lambda files: replace(files, rows=files.rows[[1, 0, 2, 3]]),
        ],
        ids=["lost", "never sent", "miscounted", "too few", "doubled", "out of order"],
    )
    def test_it_finds_what_is_wrong(self, storm, files, wrong):
        with pytest.raises(storm.Lost):
            storm.check(wrong(files), self.WRITERS, 4)

    @pytest.mark.parametrize("column", [0, 20, 41, 42, 43])
    def test_it_finds_a_torn_transition(self, storm, files, column):
        rows = files.rows.copy()
        rows.view(np.uint32)[3, column] ^= 1
        with pytest.raises(storm.Lost):
            storm.check(replace(files, rows=rows), self.WRITERS, 4)
