"""What `--gpu` and `gpu=` may name, and what is refused in one sentence."""

from typing import Any

import numpy as np
import pytest
from contracts.sentences import refuses

from dase_grpc.config.gpus import Gpus
from dase_grpc.config.texts import shown
from dase_grpc.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "indices", "text", "only"),
    [
        ("0", (0,), "0", 0),
        ("0,1,2,3", (0, 1, 2, 3), "0,1,2,3", None),
        ("3, 1", (3, 1), "3,1", None),
        ("all", None, "all", None),
        (2, (2,), "2", 2),
        ([1], (1,), "1", 1),
        (np.int64(2), (2,), "2", 2),
        (np.array(2), (2,), "2", 2),
        (range(2), (0, 1), "0,1", None),
        (np.array([4, 2]), (4, 2), "4,2", None),
    ],
    ids=repr,
)
def test_gpus_are_named_as_text_or_numbers_and_keep_their_order(
    given: Any, indices: tuple[int, ...] | None, text: str, only: int | None
) -> None:
    gpus = Gpus.parse(given)
    assert (gpus.indices, str(gpus), gpus.only) == (indices, text, only)
    assert Gpus.parse(str(gpus)) == gpus


@pytest.mark.parametrize(
    "given",
    ["", "-1", "0,-1", "0,", "first", "0;1", "ALL", -1, True, 0.0, [], [0, None], ["all"], 10**5000],
    ids=shown,
)
def test_what_names_no_gpus_is_refused(given: Any) -> None:
    with refuses(ConfigError, "names no GPUs; give indices from 0 on, as 0 or 0,1,2, or all"):
        Gpus.parse(given)


@pytest.mark.parametrize("given", ["0,1,01", [0, 1, 1]], ids=repr)
def test_a_gpu_that_is_named_twice_is_refused(given: Any) -> None:
    with refuses(ConfigError, "--gpu 0,1,1 names 1 more than once"):
        Gpus.parse(given)
