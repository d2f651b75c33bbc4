"""Promises of agents: what each says in a sentence, and what tries whether a class of agents keeps it."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from dase_grpc.config.algorithms import SIMILARITY, is_own
from dase_grpc.config.resolve import RunConfig
from dase_grpc.errors import AlgorithmError
from dase_grpc.learning.agents.batch import made_up_rows
from dase_grpc.learning.agents.policy import ActorPolicy, policy_tensors
from dase_grpc.learning.agents.registry import Agent, load_algorithm, load_policy
from dase_grpc.learning.agents.trial import (
    CPU,
    ROWS,
    UPDATES,
    Trial,
    broken,
    described,
    require_near,
    require_same,
)
from dase_grpc.learning.envs.answers import RAISED, kind, summary
from dase_grpc.learning.envs.noise import require_action
from dase_grpc.schema import Array, TransitionSchema

PATIENCE: Final = 100
"""Updates beyond agent.policy_delay after which a policy has to have moved."""

LONGEST_DELAY: Final = 1_000
"""A longer agent.policy_delay is not waited for, which might take hours: then no move is asked for."""


def _acts(trial: Trial) -> None:
    agent, observation = trial.trained(), trial.observation
    before, seen = agent.state_dict(), observation.copy()
    actions: Any = agent.act(observation)
    if not isinstance(actions, np.ndarray) or actions.dtype != np.float32:
        broken(f"act gave {described(actions)}; give a float32 array")
    wanted = (ROWS, trial.schema.action_size)
    if actions.shape != wanted:
        broken(f"act gave shape {actions.shape} for {ROWS} observations; give {wanted}")
    if not np.isfinite(actions).all() or np.abs(actions).max() > 1:
        broken("act gave an action that is not a number from -1 to 1")
    if not np.array_equal(agent.act(observation), actions):
        broken("act gave other actions for the same observations; leave noise to `exploration`")
    given = agent.policy_actions(torch.from_numpy(observation))
    if given.requires_grad or not np.allclose(given.numpy(), actions, atol=1e-5):
        broken("policy_actions gave other actions than act, or such with a gradient")
    if not np.array_equal(observation, seen):
        broken("act changed the observations")
    require_same(before, agent.state_dict(), "acting changed")


def _seeded(trial: Trial) -> None:
    first, second = trial.trained().state_dict(), trial.trained().state_dict()
    require_same(first, second, "two agents of one seed differ after the same updates in")
    own = policy_tensors(trial.make().state_dict())
    for what, other in (("agent_id", trial.make(agent_id=1)), ("seed", trial.make(seed=2))):
        found = policy_tensors(other.state_dict())
        if all(torch.equal(value, found[name]) for name, value in own.items()):
            broken(f"another {what} gives the same policy")


def _updates(trial: Trial) -> None:
    agent = trial.make()
    if agent.updates != 0:
        broken(f"updates is {agent.updates} before the first")
    began = _actor(agent)
    delay = trial.config.policy_delay
    limit = PATIENCE + (delay if delay <= LONGEST_DELAY else 0)
    for count in range(1, limit + 1):
        for name, loss in agent.update(trial.batch(count), trial.ones).items():
            if not isinstance(loss, Tensor) or loss.shape != () or loss.requires_grad or loss.device != CPU:
                broken(f"update gave {described(loss)} as {name}; give a scalar on its device, detached")
        if agent.updates != count:
            broken(f"updates is {agent.updates} after {count}")
        if count >= 2 and not torch.equal(_actor(agent), began):
            return
    if delay <= LONGEST_DELAY:
        broken(f"{limit} updates did not move the policy")


def _actor(agent: Agent) -> Tensor:
    """All of the policy's parameters as one tensor, without its normaliser."""
    return torch.cat([each.detach().flatten() for each in agent.policy.actor.parameters()])


def _weighs(trial: Trial) -> None:
    weight = trial.ones.clone()
    weight[::2] = 0
    first, second, third = trial.make(), trial.make(), trial.make()
    for number in range(UPDATES):
        batch, rng = trial.batch(number), np.random.default_rng(100 + number)
        other = trial.schema.named(made_up_rows(trial.schema, ROWS, rng))
        names = ("observation", "action", "next_observation", "reward")
        own = {name: getattr(batch, name).numpy().copy() for name in names}
        for name, values in own.items():
            values[::2] = other[name][::2]
        first.update(batch, weight)
        second.update(trial.batch(number, **own), weight)
        third.update(batch, weight * 4)
    state = first.state_dict()
    require_near(state, second.state_dict(), "what rows of weight 0 hold changed")
    require_near(state, third.state_dict(), "weights four times as large changed")


def _leaves_the_batch(trial: Trial) -> None:
    batch, weight = trial.batch(), trial.ones.clone()
    trial.make().update(batch, weight)
    found, wanted = (
        {field.name: getattr(each, field.name) for field in fields(each)} for each in (batch, trial.batch())
    )
    require_same(wanted, found, "an update changed the batch's")
    if not torch.equal(weight, trial.ones):
        broken("an update changed the weights")


def _ends_where_it_terminates(trial: Trial) -> None:
    first, second = trial.make(), trial.make()
    for number in range(UPDATES):
        first.update(trial.batch(number, bootstrap=0), trial.ones)
        other = trial.batch(number + 100).next_observation.numpy()
        second.update(trial.batch(number, bootstrap=0, next_observation=other), trial.ones)
    require_near(
        first.state_dict(), second.state_dict(), "what comes after a termination (bootstrap 0) changed"
    )


def _takes_actions(trial: Trial) -> None:
    first, second = trial.make(), trial.make()
    for number in range(UPDATES):
        batch = trial.batch(number)
        if not isinstance(second.uses_actions, bool):
            broken(f"uses_actions is {kind(second.uses_actions)}; give True or False")
        first.update(batch, trial.ones)
        second.update(batch, trial.ones, actions=second.policy_actions(batch.observation))
    require_near(first.state_dict(), second.state_dict(), "giving update the actions changed")


def _saves(trial: Trial) -> None:
    straight, resumed = trial.trained(), trial.trained(1, seed=2, agent_id=1)
    saved = straight.state_dict()
    for name, value in saved.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            broken(f"its state holds {kind(value)} as {name}; give tensors by flat, dotted names")
    kept = {name: value.clone() for name, value in saved.items()}
    resumed.load_state_dict(saved)
    if resumed.updates != straight.updates:
        broken(f"updates is {resumed.updates} after loading the state of {straight.updates}")
    for number in range(UPDATES):
        for agent in (straight, resumed):
            agent.update(trial.batch(50 + number), trial.ones)
    require_same(kept, saved, "updates after it changed the saved")
    require_same(straight.state_dict(), resumed.state_dict(), "after a load updates differ in")
    before, after = straight.act(trial.observation), resumed.act(trial.observation)
    if not np.array_equal(before, after):
        broken("after a load it acts otherwise")


def _refuses(trial: Trial) -> None:
    state = trial.trained(1).state_dict()
    wrong: dict[str, Mapping[str, Tensor]] = {
        f"without {name}": {key: value for key, value in state.items() if key != name} for name in state
    }
    first = next(iter(policy_tensors(state)))
    wrong |= {
        "with a name too many": {**state, "no.such.name": torch.zeros(1)},
        f"with another shape of {first}": {**state, first: torch.zeros(1, 1, 1)},
    }
    for what, tried in wrong.items():
        try:
            trial.make().load_state_dict(tried)
        except (KeyError, ValueError):
            continue
        broken(f"load_state_dict took a state {what}; refuse it, as networks.restore does")


def _stays_finite(trial: Trial) -> None:
    agent = trial.trained()
    agent.take_steps()
    agent.update(trial.batch(reward=np.nan), trial.ones)
    if not sum(steps.left_out for steps in agent.take_steps().values()):
        broken("take_steps counts no step that a reward of NaN had left out")
    agent.update(trial.batch(), trial.ones)
    for name, value in agent.state_dict().items():
        if not bool(value.isfinite().all()):
            broken(f"a reward of NaN made {name} not finite; leave the step out (GuardedSteps does)")
    if sum(steps.left_out for steps in agent.take_steps().values()):
        broken("after a reward of NaN it leaves out a sound step too")


def _counts_steps(trial: Trial) -> None:
    agent = trial.trained()
    found = agent.take_steps()
    if not sum(steps.tried for steps in found.values()) or any(each.left_out for each in found.values()):
        broken(f"take_steps gave {dict(found)} after {UPDATES} sound updates; count each optimiser's steps")
    if any(steps.tried for steps in agent.take_steps().values()):
        broken("take_steps gave the same steps twice; count from the last call")


def _has_the_policy(trial: Trial) -> None:
    agent: Any = trial.trained()
    if not isinstance(agent.policy, ActorPolicy):
        broken(f"policy is {kind(agent.policy)}; give an ActorPolicy, as evaluators and actors load it")
    state = agent.state_dict()
    try:
        loaded = load_policy(trial.config, trial.schema, state, CPU)
    except (KeyError, ValueError) as error:
        broken(f"load_policy refuses its state: {error.args[0]}")
    require_same(dict(agent.policy.named_tensors()), policy_tensors(state), "policy and state differ in")
    if not np.array_equal(loaded.act(trial.observation), agent.act(trial.observation)):
        broken("the policy loaded from its state acts otherwise than it does itself")


def _explores(trial: Trial) -> None:
    size = trial.schema.action_size
    first, second, third = (trial.noise() for _ in range(3))

    def act(noise: Any, calls: range, rng: np.random.Generator) -> list[Array]:
        still = np.zeros(size, np.float32)
        return [
            require_action(noise(still.copy(), version=10**call, length=call % 4, rng=rng), size)
            for call in calls
        ]

    rngs = [np.random.default_rng(7) for _ in range(2)]
    if not np.array_equal(act(first, range(6), rngs[0]), act(second, range(6), rngs[1])):
        broken("two noises with the same generator differ; draw from the `rng` that is given")
    third.load_state_dict({name: each.copy() for name, each in first.state_dict().items()})
    if not np.array_equal(act(first, range(6, 9), rngs[0]), act(third, range(6, 9), rngs[1])):
        broken("a noise that loaded another's state goes on otherwise; keep all that it remembers")


def _stacks(trial: Trial) -> None:
    alone, twin = trial.make(), trial.make(autograd=True)
    weight = torch.linspace(0.1, 1, ROWS)
    for number in range(UPDATES):
        first, second = (agent.update(trial.batch(number), weight) for agent in (alone, twin))
        require_near(first, second, "`kind`, by which it learns there, changes", tolerance=1e-3)


def _tells_errors(trial: Trial) -> None:
    agent: Any = trial.make()
    agent.tells_errors = True
    weight = trial.ones.clone()
    weight[::2] = 0
    agent.update(trial.batch(), weight)
    errors: Any = agent.td_error
    if not isinstance(errors, Tensor) or errors.shape != (ROWS,):
        broken(f"td_error is {described(errors)}; have `_learn` give {{**losses, **self._errors(q, y)}}")
    if not bool((errors[1::2] > 0).any()) or bool(errors[::2].any()):
        broken("td_error has to be 0 for rows of weight 0 only, and above for others")


@dataclass(frozen=True)
class Promise:
    """A sentence, and what tries whether it is kept: a function that raises AlgorithmError where not."""

    says: str
    look: Callable[[Trial], None]


PROMISES: Final[Mapping[str, Promise]] = {
    "actions": Promise("acting repeats itself, in float32 from -1 to 1, and changes nothing", _acts),
    "seed": Promise("seed and agent_id decide every number, and others give others", _seeded),
    "update": Promise("updates count, give scalar losses and move the policy", _updates),
    "batch": Promise("an update leaves batch and weights as they are", _leaves_the_batch),
    "weights": Promise("losses are weighted means, so a row of weight 0 has no influence", _weighs),
    "bootstrap": Promise("beyond a termination (bootstrap 0) nothing has a value", _ends_where_it_terminates),
    "given": Promise("actions that update is given change no result", _takes_actions),
    "state": Promise("what was saved goes on to the bit, whoever loads it", _saves),
    "refusal": Promise("a state that does not fit is refused", _refuses),
    "finite": Promise("a loss that is not finite is left out and leaves no trace", _stays_finite),
    "steps": Promise("the optimisers' steps are counted", _counts_steps),
    "policy": Promise("the policy is an ActorPolicy, and its state holds it", _has_the_policy),
    "exploration": Promise(
        "noise comes from the generator that is given, and can be gone on with", _explores
    ),
}
"""What every agent promises."""

STACK, ERRORS = "stack", "errors"
MORE: Final[Mapping[str, Promise]] = {
    STACK: Promise("in a stack and on a GPU it learns as it does alone on a CPU", _stacks),
    ERRORS: Promise("its updates tell the TD errors that priorities come from", _tells_errors),
}
"""What an `ActorCritic` promises besides, where the settings ask for it."""


def require_kept(name: str, trial: Trial) -> None:
    """Checks that one promise is kept.

    Raises:
        AlgorithmError: it is broken; in one sentence that names it.
    """
    promise = {**PROMISES, **MORE}[name]
    with _told(f"{trial.config.algorithm} breaks the promise of agents {name!r} ({promise.says}):"):
        promise.look(trial)


@contextmanager
def _told(front: str) -> Iterator[None]:
    try:
        yield
    except AlgorithmError as error:
        raise AlgorithmError(f"{front} {error}") from error
    except RAISED as error:
        raise AlgorithmError(f"{front} it failed with {summary(error)}") from error


def _asked(config: RunConfig, *, stacked: bool) -> Iterator[str]:
    """What of a run only an `ActorCritic` can do."""
    if config.train.cuda_graph:
        yield "train.cuda_graph = true"
    if stacked:
        yield "--stack"
    if config.train.method == "dpd":
        yield "train.method = dpd"
    if config.replay.sampling == "prioritised":
        yield "replay.sampling = prioritised"
    if config.dps.measure != SIMILARITY:
        yield f"dps.measure = {config.dps.measure}"


def try_out_agents(config: RunConfig, schema: TransitionSchema, *, stacked: bool, on_cpu: bool) -> None:
    """Tries algorithms of the user's by all that they promise and a run asks, before anything is made.

    Raises:
        AlgorithmError: one is missing, breaks a promise, or cannot do what the run asks.
    """
    asked = next(_asked(config, stacked=stacked), None)
    for agent in dict.fromkeys(config.distinct_agents):
        if not is_own(agent.algorithm):
            continue
        trial = Trial(load_algorithm(agent.algorithm), agent, schema)
        if asked is not None and not trial.has_values:
            broken(
                f"{asked} needs an algorithm that subclasses ActorCritic, TD3, DDPG or SAC, and "
                f"{agent.algorithm} does not; subclass one, or leave {asked} out"
            )
        for name in PROMISES:
            require_kept(name, trial)
        if trial.has_values and (stacked or not on_cpu):
            require_kept(STACK, trial)
        if config.replay.sampling == "prioritised":
            require_kept(ERRORS, trial)
