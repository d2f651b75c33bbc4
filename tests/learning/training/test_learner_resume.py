"""How a learner goes on from what another has kept."""

import json
import threading
from dataclasses import replace

import pytest
import torch
from contracts.sentences import assert_one_sentence
from learning.training.bench import Bench

from dase_grpc.errors import EnvironmentFailedError, RunDirectoryError
from dase_grpc.learning.training.state import Saved

LONGER = {"train__steps": 12, "eval__every": 4, "train__log_every": 5}


def stopped_after(steps: int, **settings) -> tuple[Bench, Saved]:
    """What a learner keeps that is stopped after so many steps."""
    bench, halt, kept = Bench(**settings), threading.Event(), []
    store = bench.sink.store

    def stop(row):
        store(row)
        if len(bench.sink.rows) == steps:
            halt.set()

    bench.sink.store = stop
    bench.journal.checkpoint = lambda *, step, saved, scores: kept.append(saved)
    bench.train(halt)
    return bench, kept[-1]


def resumed_from(saved: Saved, *, buffer_is_empty: bool = False, elapsed_s: float = 0.0, **settings) -> Bench:
    bench = Bench(**settings)
    learner = bench.learner()
    learner.resume(saved, elapsed_s=elapsed_s)
    if buffer_is_empty:
        learner.refill()
    learner.train(threading.Event())
    return bench


def done(bench):
    """What it did but for results."""
    return [event for event in bench.events if " at " not in event]


def test_a_resumed_learner_does_the_rest_and_nothing_twice():
    first, saved = stopped_after(6, **LONGER)
    rest = resumed_from(saved, **LONGER)
    assert first.events[-1] == "metrics at 6"
    assert ", ".join(event for event in rest.events if " at " in event) == (
        "evaluation at 8, metrics at 10, evaluation at 12, metrics at 12, checkpoint at 12"
    )
    assert rest.agent.updates == 11
    assert [record["updates"] for record in rest.journal.records] == [9, 11]


def test_training_time_goes_on():
    _, saved = stopped_after(6, **LONGER)
    rest = resumed_from(saved, elapsed_s=1000.0, **LONGER)
    for each in (*rest.journal.evaluations, *rest.journal.records):
        assert 1000 < each["wall_seconds"] < 1100


def test_with_an_empty_buffer_a_resumed_learner_stores_its_first_transitions_anew_before_it_updates():
    settings = {**LONGER, "agent__start_steps": 4}
    _, saved = stopped_after(6, **settings)
    whole = ["store", "batch", "update"]
    rest = resumed_from(saved, buffer_is_empty=True, **settings)
    assert done(rest) == ["store"] * 3 + whole * 3
    assert done(resumed_from(saved, **settings)) == whole * 6


@pytest.mark.parametrize("during", ["store", "batch"])
def test_a_learner_whose_buffer_is_lost_stores_its_first_transitions_anew_before_it_updates(during):
    bench = Bench(**LONGER, agent__start_steps=3)
    learner = bench.learner()
    place, name = {"store": (bench.sink, "store"), "batch": (bench.source, "next")}[during]
    once = getattr(place, name)

    def lost(*arguments):
        if learner.steps == 5:
            learner.refill()
        return once(*arguments)

    setattr(place, name, lost)
    learner.train(threading.Event())
    whole, left_out = ["store", "batch", "update"], {"store": ["store"], "batch": ["store", "batch"]}[during]
    assert done(bench) == ["store"] * 2 + whole * 2 + left_out + ["store"] * 2 + whole * 5


def test_moments_that_are_there_already_begin_at_none_after_a_checkpoint_from_before_the_first_batch():
    settings = {**LONGER, "dps__memory": 5.0, "agent__start_steps": 10}
    _, saved = stopped_after(6, **settings)
    assert [name for name in saved.tensors if name.startswith("similarity.")] == []
    learner = Bench(**settings).learner()
    weigher = learner.parts.weigher
    weigher.remember(1, torch.device("cpu"))
    for tensor in weigher.tensors().values():
        tensor.fill_(7.0)
    learner.resume(saved, elapsed_s=0.0)
    halt = threading.Event()
    halt.set()
    learner.train(halt)
    assert [float(tensor.abs().sum()) for tensor in weigher.tensors().values()] == [0.0] * 4


def test_where_the_environment_fails_before_a_learner_has_gone_on_its_checkpoint_stays():
    _, saved = stopped_after(6, **LONGER)
    bench = Bench(**LONGER)

    def replayed():
        raise EnvironmentFailedError("the environment raised")

    learner = bench.learner()
    learner.parts.explorer.replay = replayed
    learner.resume(saved, elapsed_s=0.0)
    with pytest.raises(EnvironmentFailedError):
        learner.train(threading.Event())
    assert bench.events == []


@pytest.mark.parametrize(
    "damage",
    [
        lambda numbers: numbers.pop("counters"),
        lambda numbers: numbers["window"].pop("losses"),
        lambda numbers: numbers["exploration"].update(generator={"state": {"state": "x"}}),
        lambda numbers: numbers.update(counters=None),
    ],
)
def test_a_state_that_is_none_is_refused_in_one_sentence(damage):
    _, saved = stopped_after(6, **LONGER)
    numbers = json.loads(json.dumps(saved.numbers))
    damage(numbers)
    with pytest.raises(RunDirectoryError) as refusal:
        resumed_from(replace(saved, numbers=numbers), **LONGER)
    assert_one_sentence(refusal.value, "the checkpoint of agent 0 cannot be gone on from")
