"""Settings of sampling: what is taken, what means nothing beside something else, and what is refused."""

import pytest
from refused_settings import refusal_of

from dase_grpc.config.resolve import parse_assignments, resolve
from dase_grpc.replay.buffer.priorities import Prioritisation
from dase_grpc.replay.buffer.sampling import UNIFORM, Sampling


@pytest.mark.parametrize(
    ("assignments", "sampling"),
    [
        ([], UNIFORM),
        (["replay.own_share=0.5"], Sampling(own_share=0.5)),
        (["replay.own_share=0"], Sampling(own_share=0.0)),
        (["replay.own_share=uniform"], UNIFORM),
        (["train.method=dpd", "train.agents=2"], Sampling(own_rows_only=True)),
        (
            ["replay.sampling=prioritised", "priorities.alpha=1", "priorities.uniform_share=0.1"],
            Sampling(prioritisation=Prioritisation(1.0, 1e-6, 0.1)),
        ),
    ],
)
def test_settings_say_how_batches_are_drawn(assignments, sampling):
    assert Sampling.of(resolve(parse_assignments(assignments))) == sampling


@pytest.mark.parametrize("share", ["1.5", "-0.1", "nan", "true", "half"])
def test_a_share_that_is_none_is_refused(share):
    assert 'must be a share from 0 to 1, or "uniform"' in str(refusal_of(f"replay.own_share={share}"))


@pytest.mark.parametrize(
    ("assignments", "words"),
    [
        (["train.method=dpd", "train.agents=2", "replay.own_share=0.5"], "replay.own_share means nothing"),
        (
            ["train.method=dpd", "train.agents=2", "replay.sampling=prioritised"],
            "replay.sampling means nothing",
        ),
        (["priorities.alpha=0.5"], "replay.sampling = prioritised only"),
        (["replay.sampling=prioritised", "priorities.beta=1.1"], "priorities.beta"),
    ],
)
def test_what_means_nothing_is_refused(assignments, words):
    assert words in str(refusal_of(*assignments))
