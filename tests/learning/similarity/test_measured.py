"""A weigher by measure: what it makes of a measure's answers, how it finds one, and what it refuses."""

import numpy as np
import pytest
import torch
from contracts.sentences import refuses
from learning.peer_rows import batch_of, rows

from dase_grpc.config.algorithms import MEASURES, SIMILARITY, DpsConfig
from dase_grpc.errors import MeasureError
from dase_grpc.learning.similarity import measures
from dase_grpc.learning.similarity.measured import MeasureWeigher, StackedWeighers, load_measure, try_out
from dase_grpc.learning.similarity.measures import Context
from dase_grpc.schema import TransitionSchema

SCHEMA = TransitionSchema("Toy-v0", 2, 3, (-1.0,) * 3, (1.0,) * 3)

GIVES = {
    "weights": lambda context: torch.arange(len(context.external)),
    "an_array": lambda context: np.arange(len(context.external)),
    "with_gradients": lambda context: torch.arange(
        len(context.external), dtype=torch.float32, requires_grad=True
    ),
    "nothing": lambda context: None,
    "a_list": lambda context: [1.0] * len(context.external),
    "a_column": lambda context: torch.ones(len(context.external), 1),
    "all_rows": lambda context: torch.ones(64 if len(context.external) < 64 else 65),
    "not_finite": lambda context: torch.full((len(context.external),), torch.nan),
    "infinite": lambda context: torch.full((len(context.external),), torch.inf),
    "negative": lambda context: torch.full((len(context.external),), -0.5),
    "sparse": lambda context: torch.ones(len(context.external)).to_sparse(),
    "complex_ones": lambda context: torch.ones(len(context.external), dtype=torch.complex64),
}
globals().update(GIVES)


def raising(context: Context) -> torch.Tensor:
    raise ValueError("no such thing")


def knows_all_but_2(context: Context) -> torch.Tensor:
    return torch.where(context.external.agent_id == 2, torch.nan, 1.0)


def needs_own_rows(context: Context) -> torch.Tensor:
    return torch.full((len(context.external),), abs(context.own.reward.numpy()).max())


class Counting:
    """Weighs the batch of each call by one over its number."""

    def __init__(self) -> None:
        self.calls = torch.zeros((), dtype=torch.int64)

    def __call__(self, context: Context) -> torch.Tensor:
        self.calls += 1
        return torch.full((len(context.external),), 1 / int(self.calls))

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.calls = state["calls"]


class Demanding(Counting):
    def __init__(self, argument: int) -> None: ...


class Forgetful(Counting):
    load_state_dict = None  # type: ignore[assignment]


class KeepsANumber(Counting):
    def state_dict(self) -> dict[str, int]:  # type: ignore[override]
        return {"calls": int(self.calls)}


class KeepsAList(Counting):
    def state_dict(self) -> list[torch.Tensor]:  # type: ignore[override]
        return [self.calls]


class LoadsNothing(Counting):
    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"calls_made": self.calls}


class HalfWay:
    def __call__(self, context: Context) -> torch.Tensor: ...

    def state_dict(self) -> dict[str, torch.Tensor]: ...


CONSTANT = 3.0


def path(name: str) -> str:
    return f"{__name__}:{name}"


def weigher(measure: str, *, own_id: int = 1, policy=None, **more) -> MeasureWeigher:
    return MeasureWeigher(
        DpsConfig(measure=measure),
        own_id=own_id,
        agents=4,
        policy=policy or (lambda observation: torch.zeros(len(observation), 3)),
        q=lambda observation, action: action.sum(-1),
        version=lambda: 0,
        **more,
    )


@pytest.mark.parametrize("name", ["weights", "an_array", "with_gradients"])
def test_external_rows_weigh_what_the_measure_gives_and_own_ones_1(name):
    actions, policy, ids = rows(0)
    found = weigher(path(name)).weigh(batch_of(actions, ids), torch.as_tensor(np.float32(policy)))
    expected = np.ones(len(ids), np.float32)
    expected[ids != 1] = np.arange(36)
    assert found.weight.dtype == torch.float32
    assert not found.weight.requires_grad
    assert found.weight.tolist() == expected.tolist()
    assert float(found.similarity) == pytest.approx(17.5)
    assert int(found.external) == 36
    assert float(found.external_share) == pytest.approx(630 / 642)
    assert float(found.effective_batch) == pytest.approx(642 / 35)
    assert not found.degenerate


@pytest.mark.parametrize("name", ["not_finite", "negative", "infinite"])
def test_a_weight_that_is_none_becomes_0_and_is_counted(name):
    actions, policy, ids = rows(0)
    found = weigher(path(name)).weigh(batch_of(actions, ids), torch.as_tensor(np.float32(policy)))
    assert found.weight.tolist() == (ids == 1).astype(float).tolist()
    assert found.degenerate
    assert float(found.similarity) == 0.0
    assert float(found.rho) == np.inf


def test_by_source_tells_the_mean_weight_of_each_agents_rows():
    actions, policy, ids = rows(0)
    batch, wanted = batch_of(actions, ids), torch.as_tensor(np.float32(policy))
    subject = weigher(path("weights"))
    weight = subject.weigh(batch, wanted).weight.numpy()
    found = subject.by_source(batch, wanted)
    means = [float(weight[ids == agent].mean()) for agent in range(4)]
    assert found.similarity.tolist() == pytest.approx([means[0], 1.0, *means[2:]])
    assert found.count.tolist() == [12] * 4
    assert not found.degenerate.any()
    assert found.mean_term[1] == 0.0 < found.mean_term[0]


@pytest.mark.parametrize("name", sorted(set(MEASURES) - {SIMILARITY}))
def test_a_built_in_measure_that_cannot_tell_is_counted_and_by_source_it_is_said_of_whom(name):
    actions, policy, ids = rows(0)
    batch, wanted = batch_of(actions, np.where(ids == 1, 2, ids)), torch.as_tensor(np.float32(policy))
    subject = weigher(name)
    found = subject.weigh(batch, wanted)
    assert found.degenerate
    assert found.weight.tolist() == [0.0] * len(ids)
    assert subject.by_source(batch, wanted).degenerate.tolist() == [True, False, True, True]


def test_by_source_says_of_whom_a_measure_could_not_tell():
    actions, policy, ids = rows(0)
    batch, wanted = batch_of(actions, ids), torch.as_tensor(np.float32(policy))
    subject = weigher(path("knows_all_but_2"))
    assert subject.weigh(batch, wanted).degenerate
    found = subject.by_source(batch, wanted)
    assert found.degenerate.tolist() == [False, False, True, False]
    assert found.similarity.tolist() == [1.0, 1.0, 0.0, 1.0]


def test_a_batch_of_own_rows_does_not_ask_the_measure():
    actions, policy, ids = rows(0)
    found = weigher(path("raising")).weigh(
        batch_of(actions, 0 * ids + 1), torch.as_tensor(np.float32(policy))
    )
    assert found.weight.tolist() == [1.0] * len(ids)
    assert not found.degenerate


def test_the_policys_actions_of_own_rows_are_asked_for_only_if_they_are_used():
    actions, policy, ids = rows(0)
    batch, wanted = batch_of(actions, ids), torch.as_tensor(np.float32(policy))
    asked = []

    def act(observation):
        asked.append(len(observation))
        return wanted[torch.from_numpy(ids == 1)]

    for measure, calls in (("relative_rows", [12]), (path("weights"), [])):
        subject = weigher(measure, policy=act)
        index = subject.rows_to_judge(batch)
        found = subject.weigh(batch, wanted[index], rows=index)
        assert asked == calls
        assert torch.equal(found.weight, weigher(measure).weigh(batch, wanted).weight)
        asked.clear()


def test_a_stack_has_each_agent_weigh_its_own_batch_when_it_is_its_turn():
    cases = [rows(seed) for seed in (0, 1, 2)]
    batches = [batch_of(actions, ids) for actions, _, ids in cases]
    joint = type(batches[0])(
        **{name: torch.stack([getattr(each, name) for each in batches]) for name in vars(batches[0])}
    )
    policies = torch.stack([torch.as_tensor(np.float32(policy)) for _, policy, _ in cases])
    alone = [weigher("relative_rows", own_id=own) for own in (0, 1, 2)]
    stack = StackedWeighers([weigher("relative_rows", own_id=own) for own in (0, 1, 2)])
    found = stack.weigh(joint, policies, live=torch.tensor([True, False, True]))
    for place in (0, 2):
        expected = alone[place].weigh(batches[place], policies[place])
        for name, value in vars(expected).items():
            assert torch.equal(getattr(found, name)[place], value), name
        by_source = alone[place].by_source(batches[place], policies[place])
        assert torch.equal(stack.by_source(joint, policies).similarity[place], by_source.similarity)
    assert found.weight[1].tolist() == [1.0] * 48
    assert int(found.count[1]) == 0


def test_a_measure_that_remembers_is_kept_and_goes_on():
    actions, policy, ids = rows(0)
    batch, wanted = batch_of(actions, ids), torch.as_tensor(np.float32(policy))
    first = weigher(path("Counting"))
    for _ in range(3):
        first.weigh(batch, wanted)
    kept = {name: tensor.clone() for name, tensor in first.tensors().items()}
    again = weigher(path("Counting"))
    again.make_room(kept, torch.device("cpu"))
    assert float(again.weigh(batch, wanted).similarity) == 0.25
    assert int(kept["calls"]) == 3


@pytest.mark.parametrize("name", sorted(set(MEASURES) - {SIMILARITY}))
def test_a_measure_of_each_name_is_there(name):
    assert callable(load_measure(name))


REFUSED = {
    "nothing": ("returned nothing", "return a tensor of one weight a row"),
    "a_list": ("returned an object of type list", "return a tensor"),
    "a_column": ("returned shape (32, 1) for 32 external rows", "return one weight for each, (32,)"),
    "all_rows": ("returned shape (64,) for 32 external rows",),
    "not_finite": ("gave NaN for every row", "give that where it cannot tell only"),
    "infinite": ("gave an infinite weight", "give NaN where it cannot tell"),
    "KeepsANumber": ("state_dict of the measure", "gave an object of type int as 'calls'", "give tensors"),
    "KeepsAList": ("state_dict of the measure", "gave an object of type list; give tensors by name"),
    "negative": ("the weight -0.5", "give none below 0"),
    "sparse": ("returned a sparse tensor", "return a dense one"),
    "complex_ones": ("complex numbers", "return real ones"),
    "CONSTANT": ("is an object of type float", "name a function, or a class with __call__"),
    "HalfWay": ("has one of state_dict and load_state_dict", "give it both or neither"),
    "missing": ("has no measure 'missing'", "name a function or class"),
}


@pytest.mark.parametrize(("name", "parts"), REFUSED.items())
def test_a_measure_that_breaks_the_rules_is_refused_in_a_sentence(name, parts):
    with refuses(MeasureError, *parts):
        try_out(DpsConfig(measure=path(name)), SCHEMA, agents=2)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("raising", "failed with ValueError: no such thing"),
        ("needs_own_rows", "failed with ValueError: "),
        ("Demanding", "failed with TypeError: "),
        ("LoadsNothing", "failed with KeyError: 'calls'"),
    ],
)
def test_a_measure_that_raises_is_refused_with_what_it_said(name, said):
    with pytest.raises(MeasureError, match=said):
        try_out(DpsConfig(measure=path(name)), SCHEMA, agents=2)


def test_a_measure_named_by_its_file_or_in_no_module_is_refused():
    with refuses(MeasureError, "names a file, but measures are named by their module", "write mine:fresh"):
        load_measure("mine.py:fresh")
    with refuses(MeasureError, "there is no module 'nowhere' for the measure 'nowhere:fresh'"):
        load_measure("nowhere:fresh")


@pytest.mark.parametrize("name", ["weights", "an_array", "Counting", "knows_all_but_2"])
def test_a_sound_measure_passes(name):
    try_out(DpsConfig(measure=path(name)), SCHEMA, agents=1)


@pytest.mark.parametrize("name", sorted(set(MEASURES) - {SIMILARITY}))
def test_a_built_in_measure_passes_as_ones_own_for_many_joints(name):
    schema = TransitionSchema("Toy-v0", 2, 61, (-1.0,) * 61, (1.0,) * 61)
    try_out(DpsConfig(measure=f"{measures.__name__}:{name}"), schema, agents=2)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"measure": "jeffreys"}, ["measure = 'jeffreys' is not one of similarity, relative"]),
        (
            {"measure": "advantage", "normalise": True},
            ["normalise = True is not read by measure = advantage"],
        ),
        (
            {"measure": "relative", "divergence": "none"},
            ["divergence = none is not read by measure = relative"],
        ),
    ],
)
def test_settings_that_a_measure_does_not_read_are_refused(options, parts):
    with pytest.raises(ValueError, match=parts[0]):
        DpsConfig(**options)
    DpsConfig(measure="relative", normalise=True)
    DpsConfig(measure="mine:fresh", divergence="js", scope="agent", floor=True)
