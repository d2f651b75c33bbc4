"""Updates by passes written out against their reference twins by autograd, and rows left out of them."""

import numpy as np
import pytest
import torch
from learning.agent_cases import CONFIGS, assert_near, gradients, make, tiny, update_drawn
from learning.td3_cases import B, as_batch, assert_same, columns, weights

from dase_grpc.learning.agents.batch import NEGLIGIBLE, that_count
from dase_grpc.learning.agents.passes import WORTH_ROUNDING

MORE = {
    "td3 delayed": tiny("td3", policy_delay=2, critic_weight_decay=0.1, hidden=(6,)),
    "ddpg with one hidden layer": tiny("ddpg", hidden=(6,)),
    "ddpg with three hidden layers": tiny("ddpg", hidden=(6, 5, 4)),
    "sac with three hidden layers": tiny("sac", hidden=(6, 5, 4)),
}


@pytest.fixture(params=CONFIGS | MORE)
def config(request):
    return (CONFIGS | MORE)[request.param]


# The reference twins


@pytest.mark.slow
def test_in_float64_many_updates_are_those_by_autograd(config):
    agent, twin = (make(config, dtype=torch.float64, autograd=autograd) for autograd in (False, True))
    weight = torch.from_numpy(weights())
    for step in range(60):
        weight = weight.roll(1)
        losses = [update_drawn(each, step, weight, torch.float64) for each in (agent, twin)]
        assert_near(*losses, rel=1e-9, abs_=1e-9)
    assert_near(agent.state_dict(), twin.state_dict(), rel=1e-7, abs_=1e-9)


def test_gradients_of_one_update_are_those_of_autograd_in_float64(config):
    agent, twin = (make(config, dtype=torch.float64, autograd=autograd) for autograd in (False, True))
    for each in (agent, twin):
        update_drawn(each, 0, torch.from_numpy(weights()), torch.float64)
    for ours, theirs in gradients(agent, twin):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-14)


@pytest.mark.slow
def test_in_float32_hundreds_of_updates_stay_by_the_twins_as_rounding_allows(config):
    small = config.model_copy(update={"actor_lr": 1e-4, "critic_lr": 1e-4, "critic_weight_decay": 0.0})
    agent, twin, exact = (
        make(small, dtype=dtype, autograd=autograd)
        for dtype, autograd in ((torch.float32, False), (torch.float32, True), (torch.float64, True))
    )
    weight = torch.from_numpy(weights()).float()
    for step in range(200):
        for each in (agent, twin, exact):
            update_drawn(each, step % 20, weight, torch.float64 if each is exact else torch.float32)
    names = [name for name in exact.state_dict() if name.split(".")[0] in ("actor", "critic")]

    def distance(each):
        return max(float((each.state_dict()[n].double() - exact.state_dict()[n]).abs().max()) for n in names)

    assert distance(agent) <= max(4 * distance(twin), 1e-5)


# The pass that the similarity weights need


@pytest.mark.parametrize("products", ["float32", "bfloat16"])
def test_actions_given_change_no_bit_of_an_update(config, products):
    if products == "bfloat16":
        config = config.model_copy(update={"products": products, "hidden": (WORTH_ROUNDING,) * 3})
    plain, given = make(config), make(config)
    for step in range(4):
        batch, weight = as_batch(columns(step)), torch.from_numpy(0.1 + weights(step)).float()
        actions = given.policy_actions(batch.observation)
        assert_same(plain.update(batch, weight), given.update(batch, weight, actions=actions))
    assert_same(plain.state_dict(), given.state_dict())


def test_actions_given_change_no_result_where_rows_are_left_out(config):
    plain, given = (make(config, dtype=torch.float64) for _ in range(2))
    for step in range(4):
        weight = torch.from_numpy(weights(step))
        actions = given.policy_actions(torch.from_numpy(columns(step)["observation"]))
        kept = update_drawn(given, step, weight, torch.float64, actions=actions)
        assert_near(update_drawn(plain, step, weight, torch.float64), kept, rel=1e-9, abs_=1e-12)
    assert_near(plain.state_dict(), given.state_dict(), rel=1e-9, abs_=1e-12)


def test_actions_of_an_earlier_pass_are_not_used(config):
    plain, given = make(config), make(config)
    for step in range(3):
        batch = as_batch(columns(step))
        actions = given.policy_actions(as_batch(columns(99)).observation)
        given.policy_actions(batch.observation)
        assert_same(plain.update(batch, torch.ones(B)), given.update(batch, torch.ones(B), actions=actions))
        kept = given.policy_actions(batch.observation)
    assert_same(plain.update(batch, torch.ones(B)), given.update(batch, torch.ones(B), actions=kept))


# Rows left out


@pytest.mark.parametrize(
    ("weight", "kept"),
    [
        ([1, 1, 1], None),
        ([1, 0, 1], [0, 2]),
        ([1, NEGLIGIBLE, 1e-3], [0, 2]),
        ([1, 2 * NEGLIGIBLE, 0], [0, 1]),
        ([0, 1e-37, 0], [1]),
        ([1e-20, 1e-20, 1e-33], [0, 1]),
        ([0, 0, 0], None),
    ],
)
def test_rows_count_whose_weight_is_more_than_a_share_of_the_largest(weight, kept):
    rows = that_count(torch.tensor(weight, dtype=torch.float32))
    assert (rows if rows is None else rows.tolist()) == kept


def test_rows_of_weight_zero_are_left_out_to_the_bit(config):
    whole, part, inside = make(config), make(config), np.arange(B) % 3 > 0
    weight = torch.from_numpy(inside.astype(np.float32))
    for step in range(6):
        losses = update_drawn(whole, step, weight, torch.float32)
        assert_same(losses, update_drawn(part, step, weight[inside], torch.float32, inside))
    assert_same(whole.state_dict(), part.state_dict())


@pytest.mark.parametrize("external", [0.0, NEGLIGIBLE])
def test_leaving_rows_out_changes_no_more_than_rounding_does(config, external):
    agent, twin = make(config), make(config, autograd=True)
    weight = torch.ones(B)
    weight[::2] = external
    for step in range(3):
        losses = [update_drawn(each, step, weight, torch.float32) for each in (agent, twin)]
        assert_near(*losses, rel=1e-4, abs_=1e-5)
    for ours, theirs in gradients(agent, twin):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


def test_the_noise_of_a_row_stays_its_own_when_others_are_left_out(config):
    agent, same = make(config), make(config)
    weight = torch.ones(B)
    weight[::2] = 0
    drawn = same.room_for_noise(as_batch(columns()))
    same._draw(drawn)
    losses = agent.update(as_batch(columns()), weight)
    assert_same(losses, same.update_with(as_batch(columns()), weight, *drawn))
