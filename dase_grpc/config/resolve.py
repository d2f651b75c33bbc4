"""RunConfig: the one configuration of a run, read from presets, TOML, flags and `--set`, or refused."""

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

from pydantic import Field, ValidationError, model_validator

from dase_grpc.config.algorithms import AgentConfig, DpdConfig, DpsConfig, algorithm_name
from dase_grpc.config.sections import (
    SINGLE,
    EnvConfig,
    EvalConfig,
    MetricsConfig,
    PolicyConfig,
    PrioritiesConfig,
    ReplayConfig,
    Section,
    TrainConfig,
)
from dase_grpc.config.texts import shown, toml_file, toml_tables
from dase_grpc.errors import ConfigError
from dase_grpc.progress import several

MEMBERS_DIFFER: Final = (
    "agent and the first of members differ; leave agent out, since members says what each is"
)

_EXAMPLE: Final = "e.g. --set dps.divergence=kl"

_BY_ALGO: Final = "name the algorithms of a mixed ensemble as in --algo td3,sac"

_BRANCHES: Final = ("constrained-int", "int", "str")
"""What pydantic adds to a location for the alternatives of a union."""

_ALIKE: Final = 0.6
"""How alike (difflib's ratio) two names must be for one to be suggested for the other."""

_PHRASES: Final[Mapping[str, str]] = {
    "boolean": "must not be true or false",
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "int_parsing": "must be a whole number",
    "int_parsing_size": "is too large",
    "int_from_float": "must be a whole number",
    "int_type": "must be a whole number",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "finite_number": "must be finite",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "literal_error": "must be {expected}",
    "string_type": "must be a text",
    "string_too_short": "must not be empty",
    "too_large": "is too large; whole numbers have at most 64 bits",
    "too_short": "must not be empty",
    "tuple_type": "must be a list",
    "dict_type": "must be a table",
    "model_type": "must be a table of settings",
}
"""Pydantic's kinds of error in words that follow `key = value`."""


class RunConfig(Section):
    """Everything that decides a run. Immutable; made by `resolve` or `RunConfig()`."""

    env: EnvConfig = Field(default_factory=EnvConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    agent: AgentConfig = Field(default_factory=AgentConfig)
    dps: DpsConfig = Field(default_factory=DpsConfig)
    dpd: DpdConfig = Field(default_factory=DpdConfig)
    replay: ReplayConfig = Field(default_factory=ReplayConfig)
    priorities: PrioritiesConfig = Field(default_factory=PrioritiesConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    policy: PolicyConfig = Field(default_factory=PolicyConfig)
    metrics: MetricsConfig = Field(default_factory=MetricsConfig)
    members: tuple[AgentConfig, ...] = Field(
        (), description="one table for each agent of a mixed ensemble; `agent` is then the first of them"
    )

    @model_validator(mode="before")
    @classmethod
    def _leads_with_the_first_member(cls, values: Any) -> Any:
        members = listed_members(values) if isinstance(values, Mapping) else ()
        return {**values, "agent": members[0]} if members and "agent" not in values else values

    @property
    def method(self) -> str:
        """`single`, `dase` or `dpd`: what the paper calls this run."""
        return SINGLE if self.train.agents == 1 else self.train.method

    @property
    def shares_experience(self) -> bool:
        """Whether agents learn from each other's transitions."""
        return self.train.method != "dpd"

    @property
    def anneals(self) -> bool:
        """Whether what an agent learns up to a step depends on the total of steps: β grows until there."""
        return self.replay.sampling == "prioritised" and self.priorities.beta != self.priorities.beta_final

    @property
    def distinct_agents(self) -> tuple[AgentConfig, ...]:
        """The settings of each member of a mixed ensemble, or those that all agents share, once."""
        return self.members or (self.agent,)

    @property
    def algorithms(self) -> tuple[str, ...]:
        """Each once, in the order of the agents that use them first."""
        return tuple(dict.fromkeys(each.algorithm for each in self.distinct_agents))

    @property
    def start_steps(self) -> int:
        """Random steps after which every agent learns: the most that any of them begins with."""
        return max(each.start_steps for each in self.distinct_agents)

    def for_agent(self, agent_id: int) -> Self:
        """The run as this agent lives it: with its own settings as `agent`, and no `members`."""
        if not self.members:
            return self
        return self.model_copy(update={"agent": self.members[agent_id], "members": ()})

    def agent_name(self, agent_id: int) -> str:
        """What people call an agent: "agent 0", or "agent 0 (TD3)" where algorithms are mixed."""
        name = f"agent {agent_id}"
        if len(self.algorithms) < 2 or agent_id >= len(self.members):
            return name
        return f"{name} ({algorithm_name(self.members[agent_id].algorithm)})"

    @property
    def collected_before_updates(self) -> int:
        """Transitions that all agents together store before the first update of each."""
        if not self.members:
            return self.train.agents * self.agent.stored_before_updates
        return sum(each.stored_before_updates for each in self.members)

    @model_validator(mode="after")
    def _has_one_member_for_each_agent(self) -> Self:
        count = len(self.members)
        if count and count != self.train.agents:
            raise ValueError(
                f"members lists {several(count, 'agent')} and train.agents = {self.train.agents}; "
                f"give a table for each"
            )
        if count and self.agent != self.members[0]:
            raise ValueError(MEMBERS_DIFFER)
        return self

    @model_validator(mode="after")
    def _distils_in_a_pair(self) -> Self:
        if self.train.method != "dpd" and self.dpd != DpdConfig():
            raise ValueError(
                f"the settings of dpd are read with train.method = dpd only, and it is "
                f"{self.train.method}; leave them out or choose dpd"
            )
        if self.train.method == "dpd" and (problem := self._why_no_pair()):
            raise ValueError(problem)
        return self

    def _why_no_pair(self) -> str | None:
        if self.train.agents != 2:
            return f"train.method = dpd trains a pair, and train.agents = {self.train.agents}; set it to 2"
        if self.dps != DpsConfig():
            return (
                "train.method = dpd weighs no transitions of others, so the settings of dps mean nothing; "
                "leave them out"
            )
        for name in ("own_share", "sampling"):
            if getattr(self.replay, name) != "uniform":
                return (
                    f"train.method = dpd draws an agent's own transitions alone and uniformly, so "
                    f"replay.{name} means nothing; leave it out"
                )
        if self.eval.by == "evaluator":
            return (
                "eval.by = evaluator is not for train.method = dpd, whose policies are published every "
                "dpd.publish_every updates and not at the steps of evaluations; leave it out"
            )
        if len(discounts := {each.gamma for each in self.members}) > 1:
            return (
                f"train.method = dpd compares the agents' values, so gamma has to be the same for both, and "
                f"it is {' and '.join(f'{each:g}' for each in sorted(discounts))}"
            )
        return None

    @model_validator(mode="after")
    def _reads_priorities(self) -> Self:
        if self.replay.sampling == "uniform" and self.priorities != PrioritiesConfig():
            raise ValueError(
                "the settings of priorities are read with replay.sampling = prioritised only, and it is "
                "uniform; leave them out or choose prioritised"
            )
        return self

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if isinstance(self.replay.capacity, int):
            require_capacity(self, self.replay.capacity)
        first = self.collected_before_updates
        if self.replay.min_size > first:
            raise ValueError(
                f"replay.min_size = {self.replay.min_size} exceeds the {first} transitions "
                f"collected by {several(self.train.agents, 'agent')} before the first update "
                f"(agent.start_steps = {self.agent.start_steps}), so no update would ever come; "
                f"set replay.min_size to at most {first}"
            )
        most = 65_535 - self.train.agents * (1 + self.train.actors)
        if self.metrics.port and self.metrics.port > most:
            raise ValueError(
                f"metrics.port = {self.metrics.port} leaves no port for "
                f"{'an actor of ' if self.train.actors else ''}agent {self.train.agents - 1}; "
                f"{f'set it to at most {most}' if most > 0 else 'leave it out'}"
            )
        return self


def listed_members(layer: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The tables of `members` in a layer of settings; none where it has none, or something else there."""
    members = layer.get("members")
    fits = isinstance(members, (list, tuple)) and all(isinstance(each, Mapping) for each in members)
    return members if fits and members else ()


def require_capacity(config: RunConfig, capacity: int) -> None:
    """What does not fit into `capacity` transitions is a ValueError, which validation makes a ConfigError."""
    agents = config.distinct_agents
    for key, value in (
        *(("agent.batch_size", each.batch_size) for each in agents),
        *(("agent.start_steps", each.start_steps) for each in agents),
        ("replay.min_size", config.replay.min_size),
    ):
        if value > capacity:
            raise ValueError(
                f"{key} = {value} exceeds replay.capacity = {capacity}; raise the capacity or lower {key}"
            )


def resolve(*layers: Mapping[str, Any]) -> RunConfig:
    """Nested mappings over the defaults, later ones win; what is wrong is a ConfigError in one sentence."""
    merged: dict[str, Any] = {}
    for layer in layers:
        _merge(merged, layer)
    try:
        return RunConfig.model_validate(merged)
    except ValidationError as error:
        raise ConfigError(sentence(error, known=setting_names())) from None


def read_toml(path: Path) -> dict[str, Any]:
    """The settings in a TOML file; the tables a run directory adds (`versions`, `run`) are left out.

    A file that is missing, or is not TOML, is a ConfigError.
    """
    try:
        values = toml_file(path)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    return {key: value for key, value in values.items() if key not in ("versions", "run")}


def parse_assignments(assignments: Iterable[str]) -> dict[str, Any]:
    """Nested settings from `section.key=value` texts; a value is TOML, or else a plain string.

    A text without `=` or without a section is a ConfigError.
    """
    nested: dict[str, Any] = {}
    for text in assignments:
        key, equals, value = text.partition("=")
        parts = [part.strip() for part in key.split(".")]
        if not equals or len(parts) < 2 or not all(parts):
            hint = _assignment_hint(parts[0], value) if equals and len(parts) == 1 else _EXAMPLE
            raise ConfigError(f"--set {text!r} is not of the form section.key=value; {hint}")
        branch: Any = _parse_value(value.strip())
        for part in reversed(parts):
            branch = {part: branch}
        _merge(nested, branch)
    return nested


def _assignment_hint(key: str, value: str) -> str:
    if key in sections():
        first = next(iter(sections()[key].model_fields))
        return f"name a setting in the section {key}, e.g. --set {key}.{first}=VALUE"
    if key == "members":
        return _BY_ALGO
    guess = nearest_setting(key, setting_names())
    return f"did you mean --set {guess}={value}?" if guess else _EXAMPLE


def _parse_value(text: str) -> Any:
    try:
        return toml_tables(f"value = {text}")["value"]
    except ValueError:
        return text


def _merge(target: dict[str, Any], layer: Mapping[str, Any]) -> None:
    """Copies a layer into `target`; no table of `target` is ever one of a layer's."""
    for key, value in layer.items():
        if not isinstance(value, Mapping):
            target[key] = value
            continue
        if not isinstance(target.get(key), dict):
            target[key] = {}
        _merge(target[key], value)


def sections() -> dict[str, type[Section]]:
    """The sections of the configuration by name; `members`, a list of agents' sections, is none."""
    annotations = {name: field.annotation for name, field in RunConfig.model_fields.items()}
    return {
        name: kind
        for name, kind in annotations.items()
        if isinstance(kind, type) and issubclass(kind, Section)
    }


def setting_names() -> list[str]:
    """Every setting as `section.key`, in order."""
    return [f"{name}.{key}" for name, section in sections().items() for key in section.model_fields]


def dotted(values: Mapping[str, Any], known: Sequence[str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Each value by its name with dots, however it is nested; the value of a `known` setting stays whole."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and name not in known:
            yield from dotted(value, known, f"{name}.")
        else:
            yield name, value


def sentence(error: ValidationError, *, known: Sequence[str]) -> str:
    """The first problem of a pydantic error in one sentence; `known` are all settings as `section.key`."""
    first = error.errors(include_url=False)[0]
    kind, value = first["type"], first["input"]
    key = ".".join(str(part) for part in first["loc"] if part not in _BRANCHES)
    if kind == "extra_forbidden":
        return unknown_setting(key, value, known)
    if kind == "value_error":  # our own words, which name the value
        message = str(first["msg"]).removeprefix("Value error, ")
        named = any(
            name.startswith(f"{key}.") and message.startswith(f"{name[len(key) + 1 :]} ") for name in known
        )
        return f"{key}{'.' if named else ': '}{message}" if key else message
    phrase = _PHRASES.get(kind)
    words = phrase.format(**first.get("ctx", {})) if phrase else f"is refused: {first['msg']}"
    return f"{key} = {_shown(value)} {words}"


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value, default=str, ensure_ascii=False)
    except ValueError:
        return shown(value)
    return text if len(text) <= 80 else text[:77] + "..."


def unknown_setting(key: str, value: Any, known: Sequence[str]) -> str:
    """Says that `known` has no such key, and which one may be meant."""
    if key == "members":
        return f"members is read from files only; {_BY_ALGO}"
    if key in sections():
        guess = nearest_setting(key, known)
        return f"{key} = {_shown(value)} must be a table of settings{f', or is it {guess}?' if guess else ''}"
    if "." not in key and isinstance(value, Mapping) and value:
        key = f"{key}.{next(iter(value))}"
    guess = nearest_setting(key, known)
    hint = f"did you mean {guess}?" if guess else "`dase config` lists all settings"
    return f"unknown setting {key}; {hint}"


def nearest_setting(key: str, known: Sequence[str]) -> str | None:
    """The one of `known`, all `section.key`, that `key`, with or without a section, may stand for."""
    section, _, name = key.rpartition(".")

    def likeness(candidate: str) -> tuple[float, ...]:
        its_section, _, its_name = candidate.partition(".")
        pairs = ((name, its_name), (section, its_section))
        return tuple(difflib.SequenceMatcher(None, *pair).ratio() for pair in pairs)

    likely = max(known, key=likeness, default=None)
    return likely if likely is not None and likeness(likely)[0] >= _ALIKE else None
