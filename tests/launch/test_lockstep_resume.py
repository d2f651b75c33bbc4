"""A lockstep run that is broken off and resumed is, byte for byte, the run without the break."""

import pytest
from resuming import CONFIGS, assert_equal, resume, train


@pytest.mark.parametrize("name", CONFIGS)
def test_n_steps_and_n_more_are_as_2n_at_once(tmp_path, name):
    settings = CONFIGS[name]
    half = settings.model_copy(update={"train": settings.train.model_copy(update={"steps": 60})})
    assert_equal(
        train(tmp_path, settings, "straight"), resume(train(tmp_path, half), steps=120), first_steps=60
    )
