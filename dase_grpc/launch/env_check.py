"""`dase check-env`: an environment by every rule that training holds it to, as a table."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from rich.console import Console
from rich.text import Text

from dase_grpc.config.presets import layered
from dase_grpc.config.resolve import dotted, parse_assignments, setting_names
from dase_grpc.config.sections import EnvConfig
from dase_grpc.errors import ConfigError, EnvironmentSpecError
from dase_grpc.launch.checks import end_hanging
from dase_grpc.launch.console import STYLES, Verdict, plain_table
from dase_grpc.learning.envs.answers import ActionMap, summary, to_float32
from dase_grpc.learning.envs.ids import resolve_id
from dase_grpc.learning.envs.make import Environment, close_env, make_env, try_out
from dase_grpc.process.watchdog import Watch, watchdog
from dase_grpc.schema import Array, TransitionSchema

STEPS: Final = 200
"""Environment steps by random actions."""

GOES_ON: Final = "goes on"


@dataclass(frozen=True)
class Rule:
    """A rule, and what the environment makes of it."""

    name: str
    verdict: Verdict
    found: str


def check_env_here(env_id: str, assignments: Sequence[str], console: Console) -> int:
    """Prints a table; 1 where agents cannot train in the environment, else 0.

    A call that does not return within `env.timeout_s` ends the process, with one sentence.

    Raises:
        ConfigError: a setting is unknown, out of range, or not of the environment.
    """
    config = layered(flags={"env.id": env_id}, assignments=assignments).env
    _require_read(assignments)
    watch = Watch("the environment that is checked")
    with watchdog([watch], timeout_s=config.timeout_s, on_hang=end_hanging):
        rules = list(rules_of(config, watch))
    cells = ((rule.name, Text(rule.verdict, STYLES[rule.verdict]), rule.found) for rule in rules)
    console.print(plain_table("rule", "is", "found", rows=cells))
    return int(any(rule.verdict == "bad" for rule in rules))


def _require_read(assignments: Sequence[str]) -> None:
    """Checks that no setting is given that the look does not read."""
    for name, _ in dotted(parse_assignments(assignments), setting_names()):
        if name == "env.id":
            raise ConfigError("--set env.id and ID both name the environment; leave --set env.id out")
        if not name.startswith("env."):
            raise ConfigError(
                f"--set {name} says nothing about the environment that is checked; leave it out"
            )


def rules_of(config: EnvConfig, watch: Watch) -> Iterator[Rule]:
    """What each rule finds; the later ones only where the environment holds the first."""
    try:
        name = resolve_id(config.id)
    except EnvironmentSpecError as error:
        yield Rule("there is such an environment", "bad", str(error))
        return
    yield Rule("there is such an environment", "good", name)
    result = try_out(config, watch)
    for finding in result.findings:
        yield Rule("Gymnasium's interface, spaces we can use", "bad", str(finding))
    if result.findings or result.schema is None:
        return
    yield Rule("Gymnasium's interface, spaces we can use", "good", _described(result.schema))
    for note in result.notes:
        yield Rule("finite numbers", "note", note)
    yield from _played(config, result.schema, watch)


def _described(schema: TransitionSchema) -> str:
    bounds = f"[{min(schema.action_low):g}, {max(schema.action_high):g}]"
    return f"{schema.observation_size} observation and {schema.action_size} action components in {bounds}"


def _played(config: EnvConfig, schema: TransitionSchema, watch: Watch) -> Iterator[Rule]:
    """Plays by random actions, twice from the same seed in new environments, as a resumed run repeats it."""
    try:
        first, again = (_episode(config, schema, watch) for _ in range(2))
    except Exception as error:  # noqa: BLE001 - someone else's environment
        yield Rule("steps by random actions", "bad", f"raised {summary(error)}")
        return
    yield Rule("steps by random actions", "good", str(first))
    if np.isfinite(first.observations).all() and np.isfinite(first.rewards).all():
        yield Rule("finite numbers", "good", "all of them")
    else:
        yield Rule("finite numbers", "note", "transitions that are not finite will be left out")
    if first.is_as(again):
        yield Rule("the same seed plays the same episode", "good", "observations and rewards are equal")
    else:
        what = "it does not: lockstep runs will differ, and no resumed run is as without its break"
        yield Rule("the same seed plays the same episode", "note", what)


def _episode(config: EnvConfig, schema: TransitionSchema, watch: Watch) -> "PlayedEpisode":
    with watch.during("making"):
        env = make_env(config.id, config.kwargs)
    try:
        return PlayedEpisode.play(env, schema, watch)
    finally:
        with watch.during("close"):
            close_env(env, owner="the environment that was checked")


@dataclass(frozen=True)
class PlayedEpisode:
    """Steps from a reset with seed 0: observations (N + 1, m), rewards (N,), how and how fast it ended."""

    observations: Array
    rewards: Array
    ended: str
    seconds: float

    def __str__(self) -> str:
        """One line for a person to read."""
        count = len(self.rewards)
        return f"{count} steps, {self.ended}; {count / max(self.seconds, 1e-9):,.0f} steps/s"

    @classmethod
    def play(cls, env: Environment, schema: TransitionSchema, watch: Watch) -> "PlayedEpisode":
        """Plays until the episode ends, `STEPS` steps at most."""
        rng, act = np.random.default_rng(0), ActionMap(env.action_space)
        with watch.during("reset"):
            observation, _ = env.reset(seed=0)
        seen, rewards = [to_float32(observation, schema.observation_size)], list[float]()
        ended, began = GOES_ON, time.perf_counter()
        while len(rewards) < STEPS and ended == GOES_ON:
            action = act(rng.uniform(-1, 1, schema.action_size).astype(np.float32))
            with watch.during("step"):
                observation, reward, terminated, truncated, _ = env.step(action)
            seen.append(to_float32(observation, schema.observation_size))
            rewards.append(float(reward))
            ended = "terminated" if terminated else "truncated" if truncated else ended
        return cls(np.stack(seen), np.array(rewards, np.float32), ended, time.perf_counter() - began)

    def is_as(self, other: "PlayedEpisode") -> bool:
        """Whether the two are equal to the bit."""
        ours, theirs = (self.observations, self.rewards), (other.observations, other.rewards)
        return all(np.array_equal(x, y, equal_nan=True) for x, y in zip(ours, theirs, strict=True))
