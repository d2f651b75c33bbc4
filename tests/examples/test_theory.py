"""Theorem 1 and its corollary in small worlds, against exact solutions; docs/theory.md says what it means."""

import importlib.util
from functools import partial
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

SCRIPT = Path(__file__).parents[2] / "examples/theory.py"
AGENTS, STATES, ACTIONS = 3, 4, 2
SHAPE = (STATES, ACTIONS)
SEEDS = 5
DISCOUNT, NOISE = 0.6, 0.2
STEPS = 4000
BOUND = 0.08
"""On the largest error of Q after STEPS; it starts at 1.2 and more."""
FIXED = (0.0, 0.3, 1.0)


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("theory", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


theory = load()
SIZES = {"worlds": SEEDS, "states": STATES, "actions": ACTIONS}


@pytest.fixture(scope="module")
def worlds():
    return theory.random_worlds(np.random.default_rng(1), **SIZES, discount=DISCOUNT, noise=NOISE)


@pytest.fixture(scope="module")
def truth(worlds):
    return theory.optimal_values(worlds)


@pytest.fixture(scope="module")
def policies():
    return theory.random_policies(np.random.default_rng(2), agents=AGENTS, **SIZES)


@pytest.fixture(scope="module")
def buffer(worlds, policies):
    return theory.collect(worlds, policies, np.random.default_rng(3), steps=STEPS)


@pytest.fixture(scope="module")
def uncovered(worlds, policies):
    """A buffer in which agent 0 never takes action 1 in state 0; the others do."""
    narrow = policies.copy()
    narrow[0, :, 0] = [1, 0]
    return theory.collect(worlds, narrow, np.random.default_rng(4), steps=STEPS)


@pytest.fixture
def world(worlds):
    """One world, for the operators."""
    return theory.Worlds(worlds.transition[:1], worlds.reward[:1], 0.9)


def errors(values, truth):
    return np.abs(values - truth).max(axis=(-2, -1))


def several(buffer, worlds, choices):
    """The same rows once for each choice side by side; `choices` is called with the copies' λ (M · n,)."""
    columns = np.tile(np.arange(SEEDS), len(choices))
    wide = theory.Worlds(worlds.transition[columns], worlds.reward[columns], worlds.discount)
    weight = np.repeat(choices, SEEDS)
    learned = theory.q_learning(buffer.columns(columns), wide, lambda values, seen: weight)[-1]
    return dict(zip(choices, learned.reshape(len(choices), SEEDS, *SHAPE), strict=True))


# The oracle


def test_the_optimal_values_solve_bellman_s_equation(worlds, truth):
    target = worlds.reward + DISCOUNT * np.einsum("mxay,my->mxa", worlds.transition, truth.max(axis=-1))
    assert np.abs(target - truth).max() < 1e-12
    assert errors(np.zeros_like(truth), truth).min() > 1.2


def test_no_policy_is_better_than_the_optimal_values(worlds, truth):
    for policy in theory.deterministic_policies(*SHAPE):
        values = theory.policy_values(worlds, np.broadcast_to(policy, truth.shape))
        assert (values <= truth + 1e-12).all()


def test_the_buffer_follows_the_policies_and_the_worlds(worlds, policies, buffer):
    own = (buffer.agent == 1).astype(float)
    model = theory.weighted_model(buffer, own, worlds)
    assert np.abs(model.transition - worlds.transition).max() < 0.1
    assert np.abs(model.reward - worlds.reward).max() < 0.05
    in_state = own * (buffer.state == 2)
    share = (in_state * buffer.action).sum(axis=0) / in_state.sum(axis=0)
    assert share == pytest.approx(policies[1, :, 2, 1], abs=0.06)
    following = buffer.rows(np.flatnonzero(buffer.agent[:, 0] == 2))
    assert (following.state[1:] == following.next_state[:-1]).all()


# Theorem 1


@pytest.fixture(scope="module")
def learned(buffer, worlds):
    """Agent 0's values by λ."""
    return several(buffer, worlds, FIXED)


@pytest.mark.parametrize("similarity", FIXED)
def test_q_learning_converges_for_a_fixed_similarity(learned, truth, similarity):
    assert errors(learned[similarity], truth).max() < BOUND


@pytest.mark.slow
def test_the_error_goes_on_falling(worlds, truth, policies):
    long = theory.collect(worlds, policies, np.random.default_rng(3), steps=10 * STEPS)
    for similarity, values in several(long, worlds, FIXED).items():
        assert errors(values, truth).max() < BOUND / 2, similarity


@pytest.mark.parametrize("similarity", [theory.wandering, theory.agreeing])
def test_q_learning_converges_for_a_similarity_that_changes(buffer, worlds, truth, similarity):
    assert errors(theory.q_learning(buffer, worlds, similarity)[-1], truth).max() < BOUND


def test_a_pair_that_only_others_visit_is_learned_if_they_count_and_never_if_not(uncovered, worlds, truth):
    learned = several(uncovered, worlds, (0.0, 0.3))
    assert errors(learned[0.3], truth).max() < BOUND
    assert (learned[0.0][:, 0, 1] == 0).all()
    assert errors(learned[0.0], truth).min() > 10 * BOUND


@pytest.mark.parametrize("step_size", [lambda n: np.full(len(n), 0.3), lambda n: 0.5 * n**-2.0])
def test_step_sizes_that_break_the_conditions_do_not_converge(buffer, worlds, truth, step_size):
    similarity = theory.constant(1.0)
    records = theory.q_learning(buffer, worlds, similarity, step_size=step_size, every=STEPS // 10)
    half, end = (errors(records[last - 10 : last], truth).mean() for last in (15, 30))
    assert end > 2 * BOUND
    assert end > 0.8 * half


def test_a_similarity_that_falls_too_fast_stops_learning_half_way():
    rows = np.zeros((2000, 1), dtype=np.int64)
    buffer = theory.Buffer(rows + 1, rows, rows, rows + 1.0, rows)
    world = theory.Worlds(np.ones((1, 1, 1, 1)), np.ones((1, 1, 1)), 0.0)
    values = theory.q_learning(
        buffer,
        world,
        lambda values, seen: np.array([1 / (seen.row + 2)]),
        step_size=lambda visits: 1 / (visits + 1),
    )
    # The product of 1 - 1/(n + 1)² over n = 1..N is (N + 2) / (2N + 2): half the error stays for ever.
    assert values.item() == pytest.approx(1 - 2002 / 4002, abs=1e-12)


def test_a_similarity_that_looks_at_the_outcome_converges_to_something_else(buffer, worlds, truth):
    values = theory.q_learning(buffer, worlds, theory.lucky(worlds))[-1]
    lucky = buffer.reward > worlds.reward[np.arange(SEEDS), buffer.state, buffer.action]
    weight = np.where(buffer.agent == 0, 1.0, lucky)
    limit = theory.optimal_values(theory.weighted_model(buffer, weight, worlds))
    assert errors(values, limit).max() < BOUND
    assert errors(values, truth).min() > 3 * BOUND


def test_others_in_another_world_pull_the_values_away_unless_they_do_not_count(worlds, truth, policies):
    inverted = theory.Worlds(worlds.transition, 1 - worlds.reward, DISCOUNT, NOISE)
    own = theory.collect(worlds, policies[:1], np.random.default_rng(5), steps=STEPS)
    others = theory.collect(inverted, policies[1:2], np.random.default_rng(6), steps=STEPS)
    order = np.arange(2 * STEPS).reshape(2, STEPS).T.ravel()
    both = theory.Buffer(
        np.concatenate([own.agent, others.agent + 1])[order],
        *(
            np.concatenate([getattr(own, name), getattr(others, name)])[order]
            for name in ("state", "action", "reward", "next_state")
        ),
    )
    learned = several(both, worlds, (0.0, 1.0))
    assert errors(learned[0.0], truth).max() < BOUND
    assert errors(learned[1.0], truth).min() > 3 * BOUND


def test_replaying_a_finite_buffer_converges_to_the_model_its_weighted_rows_tell(buffer, worlds, truth):
    few = buffer.rows(slice(0, 120))
    replayed = few.rows(np.random.default_rng(7).integers(120, size=AGENTS * STEPS))
    limits = []
    for similarity, values in several(replayed, worlds, (0.3, 1.0)).items():
        weight = np.where(few.agent == 0, 1.0, similarity)
        limit = theory.optimal_values(theory.weighted_model(few, weight, worlds))
        assert errors(values, limit).max() < BOUND
        assert errors(values, truth).max() > 2 * BOUND
        limits.append(limit)
    assert errors(*limits).max() > BOUND, "here λ decides what is learned, not only how fast"


# The corollary


def over_policies(build):
    """The sup norm of an operator with a maximum in it: the largest over the policies that can be greedy."""
    return max(theory.sup_norm(build(policy), SHAPE) for policy in theory.deterministic_policies(*SHAPE))


def agreeing_case(rng):
    """A policy, a behaviour and a λ with λμ ≤ π, all different from state to state."""
    target = theory.random_policies(rng, agents=1, worlds=1, states=STATES, actions=ACTIONS)[0, 0]
    behaviour = theory.random_policies(rng, agents=1, worlds=1, states=STATES, actions=ACTIONS)[0, 0]
    return target, behaviour, rng.uniform(0.2, 1, size=SHAPE) * np.minimum(1, target / behaviour)


def test_weighting_the_update_contracts_by_one_minus_the_smallest_weight_times_one_minus_gamma(world):
    rng = np.random.default_rng(8)
    weight = rng.uniform(size=SHAPE)
    coefficient = over_policies(lambda policy: theory.weighted_update(world, weight, policy))
    assert coefficient == pytest.approx(1 - 0.1 * weight.min(), abs=1e-12)
    operator = theory.weighted_update(world, weight)
    first, second = rng.normal(size=(2, 200, *SHAPE))
    ratios = [
        np.abs(operator(a) - operator(b)).max() / np.abs(a - b).max()
        for a, b in zip(first, second, strict=True)
    ]
    assert max(ratios) <= coefficient
    assert np.abs(operator(first[0] + 1) - operator(first[0])).max() == pytest.approx(coefficient, abs=1e-12)


@pytest.mark.parametrize("similarity", [0.0, 0.01, 0.3, 1.0])
def test_weighting_the_update_never_contracts_as_the_corollary_says(world, similarity):
    weight = np.full(SHAPE, similarity)
    coefficient = over_policies(lambda policy: theory.weighted_update(world, weight, policy))
    assert coefficient >= 0.9 - 1e-12
    assert coefficient - (0.9 - 0.9 * similarity) > 0.09


def test_the_corollary_holds_for_one_term_of_a_return_where_lambda_mu_is_at_most_pi(world):
    target, behaviour, similarity = agreeing_case(np.random.default_rng(9))
    tail = np.zeros(SHAPE)
    coefficient = theory.sup_norm(theory.trace_step(world, target, behaviour, similarity, tail), SHAPE)
    following = world.transition[0] @ (behaviour * similarity).sum(axis=-1)  # E[λ] after each pair
    assert coefficient == pytest.approx(0.9 - 0.9 * following.min(), abs=1e-12)
    assert coefficient > 0.9 - 0.9 * following.mean() + 1e-3, "E must not be taken over the pairs as well"


def test_that_operator_has_the_right_fixed_point_only_if_its_tail_has(world):
    target, behaviour, similarity = agreeing_case(np.random.default_rng(10))
    right = theory.policy_values(world, target[None])[0]
    others = theory.policy_values(world, behaviour[None])[0]
    step = theory.trace_step(world, target, behaviour, similarity, right)
    assert np.abs(step(right) - right).max() < 1e-12
    values = np.zeros(SHAPE)
    biased = theory.trace_step(world, target, behaviour, similarity, others)
    for _ in range(500):
        values = biased(values)
    assert np.abs(biased(values) - values).max() < 1e-12
    assert np.abs(values - right).max() > 0.1


def test_at_lambda_1_with_equal_policies_it_is_a_monte_carlo_return_and_contracts_to_a_point(world):
    policy = agreeing_case(np.random.default_rng(11))[0]
    right = theory.policy_values(world, policy[None])[0]
    step = theory.trace_step(world, policy, policy, np.ones(SHAPE), right)
    assert theory.sup_norm(step, SHAPE) < 1e-12
    assert step(np.full(SHAPE, 100.0)) == pytest.approx(right, abs=1e-12)


def test_with_a_bootstrapped_tail_the_coefficient_is_gamma_minus_gamma_one_minus_gamma_lambda(world):
    target, behaviour, similarity = agreeing_case(np.random.default_rng(12))
    coefficient = theory.sup_norm(theory.two_errors(world, target, behaviour, similarity), SHAPE)
    following = world.transition[0] @ (behaviour * similarity).sum(axis=-1)
    assert coefficient == pytest.approx(0.9 - 0.9 * 0.1 * following.min(), abs=1e-12)
    right = theory.policy_values(world, target[None])[0]
    assert theory.two_errors(world, target, behaviour, similarity)(right) == pytest.approx(right, abs=1e-12)


@pytest.mark.parametrize("similarity", [0.2, 1.0])
def test_deterministic_policies_that_differ_add_instead_of_subtracting(world, similarity):
    target = np.eye(ACTIONS)[[0, 1, 0, 1]]
    step = theory.trace_step(world, target, 1 - target, np.full(SHAPE, similarity), np.zeros(SHAPE))
    assert theory.sup_norm(step, SHAPE) == pytest.approx(0.9 + 0.9 * similarity, abs=1e-12)


def test_with_a_maximum_one_pair_of_tables_already_exceeds_the_corollary(world):
    behaviour = np.eye(ACTIONS)[[1, 1, 1, 1]]
    similarity = np.full(SHAPE, 0.3)

    def step(values):
        greedy = np.eye(ACTIONS)[values.argmax(axis=-1)]
        return theory.trace_step(world, greedy, behaviour, similarity, np.zeros(SHAPE))(values)

    first = np.broadcast_to([2.0, 0.0], SHAPE)
    second = first + np.array([1.0, -1.0])
    assert np.abs(step(second) - step(first)).max() == pytest.approx(0.9 * 1.3, abs=1e-12)


def test_it_diverges_where_one_agent_stays_and_the_other_swaps():
    world, stay, swap = theory.stay_and_swap(0.9)
    step = theory.trace_step(world, stay, swap, np.full((2, 2), 0.2), np.zeros((2, 2)))
    values = step(np.array([[1.0, 0.0], [-1.0, 0.0]]))
    for _ in range(50):
        grown = step(values)
        assert np.abs(grown).max() == pytest.approx(0.9 * 1.2 * np.abs(values).max(), rel=1e-9)
        values = grown
    learned = theory.weighted_update(world, np.full((2, 2), 0.2))
    for _ in range(2000):
        values = learned(values)
    assert np.abs(values).max() < 1e-12, "weighting the update converges in the same world"


def test_it_can_be_drawn(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(theory, "draw_convergence", partial(theory.draw_convergence, steps=400, every=20))
    monkeypatch.setattr("sys.argv", ["theory.py", "--out", str(tmp_path / "theory.png")])
    theory.main()
    assert "λ = 0.3 " in capsys.readouterr().out
    assert (tmp_path / "theory.png").read_bytes().startswith(b"\x89PNG")
