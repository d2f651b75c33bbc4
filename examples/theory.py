"""Theorem 1 of DASE and its corollary, in finite worlds small enough to compute Q* and every norm exactly.

Q-learning reads a buffer that several agents fill; the own transitions count whole, the others λ.
What is shown here, and what it means, is in docs/theory.md.

    python examples/theory.py --out docs/images/theory.png
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, fields
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dase_grpc.runs.reports.figures import PALETTE

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Operator = Callable[[Array], Array]
"""From a table of values to a table of values, both (S, A)."""

AGENTS, STATES, ACTIONS, WORLDS, DISCOUNT, NOISE = 3, 4, 2, 20, 0.8, 0.2
"""Of the picture."""
TIE = 1e-12
"""Values closer than this are equal in policy iteration."""


@dataclass(frozen=True)
class Worlds:
    """M finite Markov decision processes of S states and A actions, with one discount.

    The reward of a transition is `reward` plus or minus `noise`, with equal odds.
    """

    transition: Array
    """(M, S, A, S) float64; the last axis sums to 1."""
    reward: Array
    """(M, S, A) float64."""
    discount: float
    noise: float = 0.0


def random_worlds(
    rng: np.random.Generator, *, worlds: int, states: int, actions: int, discount: float, noise: float = 0.0
) -> Worlds:
    """Next states from a flat Dirichlet, so every state reaches every other; rewards uniform in [0, 1]."""
    shape = (worlds, states, actions)
    transition = rng.dirichlet(np.ones(states), size=shape)
    return Worlds(transition, rng.uniform(size=shape), discount, noise)


def random_policies(
    rng: np.random.Generator, *, agents: int, worlds: int, states: int, actions: int
) -> Array:
    """(K, M, S, A) action probabilities, different for each agent; no probability is below 0.5 / A."""
    drawn = rng.dirichlet(np.ones(actions), size=(agents, worlds, states))
    floored: Array = 0.5 * drawn + 0.5 / actions
    return floored


def policy_values(worlds: Worlds, policy: Array) -> Array:
    """Q^π by a linear solve; policy and result are (M, S, A)."""
    count, states, actions = worlds.reward.shape
    pairs = states * actions
    follow = np.einsum("mxay,myb->mxayb", worlds.transition, policy).reshape(count, pairs, pairs)
    system = np.eye(pairs) - worlds.discount * follow
    solved: Array = np.linalg.solve(system, worlds.reward.reshape(count, pairs, 1))
    return solved.reshape(count, states, actions)


def optimal_values(worlds: Worlds) -> Array:
    """Q* by policy iteration, (M, S, A), exact but for the linear solves."""
    actions = worlds.reward.shape[-1]
    chosen = np.zeros(worlds.reward.shape[:-1], dtype=np.int64)
    while True:
        values = policy_values(worlds, np.eye(actions)[chosen])
        kept = np.take_along_axis(values, chosen[..., None], axis=-1)[..., 0]
        better = values.max(axis=-1) > kept + TIE  # a tie must not make it go round in circles
        if not better.any():
            return values
        chosen = np.where(better, values.argmax(axis=-1), chosen)


@dataclass(frozen=True)
class Buffer:
    """What K agents collected in their own copies of the world, in order of arrival, in each of M worlds."""

    agent: Ints
    """(rows, M), 0..K-1; agent 0 is the one that learns."""
    state: Ints
    action: Ints
    reward: Array
    next_state: Ints

    def rows(self, picked: Ints | slice) -> "Buffer":
        """The rows picked, in that order; a row may be picked again."""
        return Buffer(*(getattr(self, field.name)[picked] for field in fields(self)))

    def columns(self, picked: Ints) -> "Buffer":
        """The worlds picked; one may be picked again, to learn from the same rows in several ways."""
        return Buffer(*(getattr(self, field.name)[:, picked] for field in fields(self)))


def collect(worlds: Worlds, policies: Array, rng: np.random.Generator, *, steps: int) -> Buffer:
    """Every agent acts `steps` times, never reset; policies is (K, M, S, A), the result K · steps rows."""
    agents, count, states, _ = policies.shape
    world = np.arange(count)
    choose = policies.cumsum(axis=-1)
    move = worlds.transition.cumsum(axis=-1)
    chance = rng.uniform(size=(2, steps, agents, count))
    state = np.empty((steps + 1, agents, count), dtype=np.int64)
    action = np.empty((steps, agents, count), dtype=np.int64)
    state[0] = rng.integers(states, size=(agents, count))
    agent = np.arange(agents)[:, None]
    for step in range(steps):
        now = state[step]
        # The last entry of a cumulative sum may be a rounding error below 1, so it is not looked at.
        drawn = (choose[agent, world, now, :-1] < chance[0, step, ..., None]).sum(axis=-1)
        action[step] = drawn
        state[step + 1] = (move[world, now, drawn, :-1] < chance[1, step, ..., None]).sum(axis=-1)
    reward = worlds.reward[world, state[:-1], action]
    reward = reward + worlds.noise * rng.choice([-1.0, 1.0], size=reward.shape)
    shape = (steps * agents, count)
    return Buffer(
        np.broadcast_to(agent, action.shape).reshape(shape),
        state[:-1].reshape(shape),
        action.reshape(shape),
        reward.reshape(shape),
        state[1:].reshape(shape),
    )


class Seen(NamedTuple):
    """One transition in each of M worlds, as a similarity sees it; each entry but `row` is (M,)."""

    row: int
    state: Ints
    action: Ints
    reward: Array
    next_state: Ints


Similarity = Callable[[Array, Seen], Array]
"""From the current values (M, S, A) and external transitions to their weights λ in [0, 1], (M,)."""
StepSize = Callable[[Ints], Array]
"""From how often a pair has been visited, by whomever, this time included, to the step size."""


def decaying(visits: Ints) -> Array:
    """n^-0.6, whose sum is infinite and whose sum of squares is finite (Robbins and Monro)."""
    return np.asarray(visits**-0.6, dtype=np.float64)


def constant(value: float) -> Similarity:
    """The same λ for every external transition."""
    return lambda values, seen: np.full(len(values), value)


def wandering(values: Array, seen: Seen) -> Array:
    """λ between 0 and 1 that goes up and down for ever, at another pace for each pair."""
    pace = 1 + seen.state + values.shape[1] * seen.action
    return np.asarray(0.5 + 0.5 * np.sin(seen.row * pace / 500))


def agreeing(values: Array, seen: Seen) -> Array:
    """λ by the policy of the moment, as DPS has it: 1 where the action is the greedy one, 0.1 where not."""
    greedy = values[np.arange(len(values)), seen.state].argmax(axis=-1)
    return np.where(seen.action == greedy, 1.0, 0.1)


def lucky(worlds: Worlds) -> Similarity:
    """λ that looks at the outcome: 1 where the reward's noise was positive, 0 where not."""
    column = np.arange(len(worlds.reward))
    return lambda values, seen: (seen.reward > worlds.reward[column, seen.state, seen.action]).astype(float)


def q_learning(
    buffer: Buffer, worlds: Worlds, similarity: Similarity, *, step_size: StepSize = decaying, every: int = 0
) -> Array:
    """Agent 0's values after each `every` rows (0: after all rows), (records, M, S, A). They start at 0.

    Q(s, a) += α w (r + γ max_b Q(s', b) - Q(s, a)), w = 1 for agent 0's rows and λ for all others. Of the
    worlds only the sizes and the discount are used.
    """
    rows, count = buffer.state.shape
    _, states, actions = worlds.reward.shape
    values = np.zeros((count, states, actions))
    by_state, by_pair = values.reshape(-1, actions), values.reshape(-1)
    visits = np.zeros(values.size, dtype=np.int64)
    offset = np.arange(count) * states
    pairs, following = (offset + buffer.state) * actions + buffer.action, offset + buffer.next_state
    every = every or rows
    records = np.empty((rows // every, *values.shape))
    for row in range(rows):
        pair = pairs[row]
        visits[pair] += 1
        seen = Seen(row, buffer.state[row], buffer.action[row], buffer.reward[row], buffer.next_state[row])
        weight = np.where(buffer.agent[row] == 0, 1.0, similarity(values, seen))
        error = seen.reward + worlds.discount * by_state[following[row]].max(axis=-1) - by_pair[pair]
        by_pair[pair] += step_size(visits[pair]) * weight * error
        if (row + 1) % every == 0:
            records[(row + 1) // every - 1] = values
    return records


def weighted_model(buffer: Buffer, weight: Array, worlds: Worlds) -> Worlds:
    """The worlds as the buffer's rows tell them, each row counted by its weight (rows, M).

    Every pair must have a row of positive weight; sizes and discount are those of `worlds`.
    """
    count = np.arange(buffer.state.shape[1])
    mass = np.zeros_like(worlds.transition)
    earned = np.zeros_like(worlds.reward)
    np.add.at(mass, (count, buffer.state, buffer.action, buffer.next_state), weight)
    np.add.at(earned, (count, buffer.state, buffer.action), weight * buffer.reward)
    total = mass.sum(axis=-1)
    return Worlds(mass / total[..., None], earned / total, worlds.discount)


# The operators take one world: transition (S, A, S), reward (S, A), policies and λ (S, A).


def weighted_update(world: Worlds, weight: Array, policy: Array | None = None) -> Operator:
    """One expected update at step size 1: Q + w (TQ - Q), with w (S, A) the mean weight of a pair's rows.

    T is Bellman's optimality operator, or that of a policy where one is given.
    """
    transition, reward = world.transition[0], world.reward[0]

    def operator(values: Array) -> Array:
        best = values.max(axis=-1) if policy is None else (policy * values).sum(axis=-1)
        target = reward + world.discount * transition @ best
        return np.asarray(values + weight * (target - values))

    return operator


def trace_step(world: Worlds, target: Array, behaviour: Array, similarity: Array, tail: Array) -> Operator:
    """One term of a return-based target, with a tail that does not depend on Q.

    r + γ E[E_π Q(s', ·) + λ(s', a') (tail(s', a') - Q(s', a'))], with a' from the behaviour.
    """
    transition, reward = world.transition[0], world.reward[0]

    def operator(values: Array) -> Array:
        following = (target * values + behaviour * similarity * (tail - values)).sum(axis=-1)
        return np.asarray(reward + world.discount * transition @ following)

    return operator


def two_errors(world: Worlds, target: Array, behaviour: Array, similarity: Array) -> Operator:
    """The same with a tail that is bootstrapped: Q + δ + γ E[λ δ'], the first two terms of Retrace."""
    once = weighted_update(world, np.ones_like(target), target)
    return lambda values: trace_step(world, target, behaviour, similarity, once(values))(values)


def sup_norm(operator: Operator, shape: tuple[int, int]) -> float:
    """The Lipschitz constant of an affine operator in the sup norm: the largest absolute row sum."""
    units = np.eye(shape[0] * shape[1]).reshape(-1, *shape)
    base = operator(np.zeros(shape))
    columns = np.stack([(operator(unit) - base).ravel() for unit in units], axis=1)
    return float(np.abs(columns).sum(axis=1).max())


def deterministic_policies(states: int, actions: int) -> Array:
    """All A^S of them, (A^S, S, A). Bellman's optimality operator is affine where the greedy one is fixed."""
    return np.eye(actions)[list(product(range(actions), repeat=states))]


def stay_and_swap(discount: float) -> tuple[Worlds, Array, Array]:
    """Two states, an action that stays and one that goes to the other; the policies of always one of them."""
    transition = np.stack([np.eye(2), np.eye(2)[::-1]], axis=1)
    world = Worlds(transition[None], np.zeros((1, 2, 2)), discount)
    stay = np.array([[1.0, 0.0], [1.0, 0.0]])
    return world, stay, 1 - stay


def sup_error(records: Array, truth: Array) -> Array:
    """The largest error over all pairs, (records, M)."""
    return np.asarray(np.abs(records - truth).max(axis=(-2, -1)))


def draw_convergence(axis: Axes, *, steps: int = 20_000, every: int = 300) -> None:
    """The error of Q-learning by λ and what breaks it, median over the worlds; prints some of it."""
    rng = np.random.default_rng(0)
    sizes = {"worlds": WORLDS, "states": STATES, "actions": ACTIONS}
    worlds = random_worlds(rng, **sizes, discount=DISCOUNT, noise=NOISE)
    truth = optimal_values(worlds)
    policies = random_policies(rng, agents=AGENTS, **sizes)
    buffer = collect(worlds, policies, rng, steps=steps)
    narrow = policies.copy()
    narrow[0, :, 0] = np.eye(ACTIONS)[0]  # agent 0 never takes the other action in state 0
    unvisited = collect(worlds, narrow, rng, steps=steps)
    cases: tuple[tuple[str, Buffer, Similarity, StepSize], ...] = (
        ("λ = 0", buffer, constant(0.0), decaying),
        ("λ = 0.3", buffer, constant(0.3), decaying),
        ("λ = 1", buffer, constant(1.0), decaying),
        ("λ up and down for ever", buffer, wandering, decaying),
        ("λ by the greedy policy", buffer, agreeing, decaying),
        ("one pair for the others only, λ = 0.3", unvisited, constant(0.3), decaying),
        ("one pair for the others only, λ = 0", unvisited, constant(0.0), decaying),
        ("step size 0.1 for ever, λ = 1", buffer, constant(1.0), lambda visits: np.full(len(visits), 0.1)),
        ("λ = 1 for lucky rewards, else 0", buffer, lucky(worlds), decaying),
    )
    print(f"{f'largest error: at the start {np.median(truth.max(axis=(1, 2))):.3f};':40s} 1/10   end")
    seen = np.arange(1, steps * AGENTS // every + 1) * every / AGENTS
    for number, (name, rows, similarity, step_size) in enumerate(cases):
        records = q_learning(rows, worlds, similarity, step_size=step_size, every=every)
        error = np.median(sup_error(records, truth), axis=-1)
        axis.plot(seen, error, color=PALETTE[number], ls="-" if number < 6 else "--", label=name)
        print(f"{name:40s} {error[seen <= steps / 10][-1]:.3f} {error[-1]:.3f}")
    axis.set(xscale="log", yscale="log", xlabel="steps of each agent", ylabel="largest error of Q")
    axis.set_title("Solid: the assumptions hold. Dashed: one is broken.", loc="left", fontsize=9)


def draw_coefficients(axis: Axes) -> None:
    """The measured coefficient of each operator by λ, everywhere the same; dots are the closed forms."""
    weights = np.linspace(0, 1, 11)
    world, stay, swap = stay_and_swap(DISCOUNT)
    every, none = np.ones((2, 2)), np.zeros((2, 2))
    cases: tuple[tuple[str, Callable[[float], Operator], Array], ...] = (
        (
            "external rows weighted by λ: 1 − λ(1 − γ)",
            lambda x: weighted_update(world, x * every, stay),
            1 - weights * (1 - DISCOUNT),
        ),
        (
            "one term of a return, others act alike: γ − γλ",
            lambda x: trace_step(world, stay, stay, x * every, none),
            DISCOUNT * (1 - weights),
        ),
        (
            "the same, bootstrapped: γ − γ(1 − γ)λ",
            lambda x: two_errors(world, stay, stay, x * every),
            DISCOUNT * (1 - (1 - DISCOUNT) * weights),
        ),
        (
            "one term, others act differently: γ + γλ",
            lambda x: trace_step(world, stay, swap, x * every, none),
            DISCOUNT * (1 + weights),
        ),
    )
    for number, (name, operator, closed) in enumerate(cases):
        measured = [sup_norm(operator(weight), (2, 2)) for weight in weights]
        axis.plot(weights, measured, color=PALETTE[number], label=name)
        axis.plot(weights, closed, "o", color=PALETTE[number], markersize=3)
    axis.axhline(1, color="#7d7f8c", linewidth=0.8, linestyle=":")
    axis.set(xlabel="λ", ylabel="contraction coefficient, sup norm", ylim=(0, 1.7))
    axis.set_title(f"γ = {DISCOUNT}; a contraction only below 1", loc="left", fontsize=9)


def main() -> None:
    """Draws both panels and prints the errors of the left one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("theory.png"))
    options = parser.parse_args()
    figure = Figure(figsize=(10.5, 6.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    draw_convergence(left)
    draw_coefficients(right)
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=8, loc="lower left" if axis is left else "upper left")
    figure.savefig(options.out, dpi=120)
    print(options.out)


if __name__ == "__main__":
    main()
