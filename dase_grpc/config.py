"""The one configuration of a run: frozen, validated once, read from presets, TOML, flags and `--set`."""

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Literal, Self, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from dase_grpc.capacity import transitions
from dase_grpc.config_errors import sentence
from dase_grpc.errors import ConfigError

Algorithm = Literal["td3", "ddpg", "sac"]
Divergence = Literal["jeffreys", "js", "kl", "none", "isolated"]
Scope = Literal["pooled", "agent", "transition"]
ALGORITHMS: Final[tuple[str, ...]] = get_args(Algorithm)
DIVERGENCES: Final[tuple[str, ...]] = get_args(Divergence)

READ_BY_ONE: Final[Mapping[str, str]] = {
    "policy_delay": "td3",
    "target_noise": "td3",
    "target_noise_clip": "td3",
    "policy_noise": "sac",
    "policy_noise_clip": "sac",
}
"""The settings of `agent` that one algorithm alone reads; the others refuse a value but the default."""


class Section(BaseModel):
    """A frozen group of settings that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _is_no_boolean(cls, value: Any, info: ValidationInfo) -> Any:
        """Where a number or a text is wanted, pydantic would read true and false as 1 and 0."""
        if isinstance(value, bool) and cls.model_fields[str(info.field_name)].annotation is not bool:
            raise PydanticCustomError("boolean", "must not be true or false")
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _reads_whole_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        """A text for a whole number may be written as 1e5 or 100_000, as a number in TOML may."""
        if isinstance(value, str) and cls.model_fields[str(info.field_name)].annotation is int:
            return whole_number(value)
        return value


class EnvConfig(Section):
    """The environment every agent explores its own copy of."""

    id: str = Field(
        "InvertedDoublePendulum-v5",
        min_length=1,
        description="Gymnasium id, or `package.module:EnvOrFactory`",
    )
    kwargs: dict[str, Any] = Field(
        default_factory=dict, description="keyword arguments for making the environment"
    )


class TrainConfig(Section):
    """The run as a whole."""

    agents: PositiveInt = Field(2, le=1024, description="K, the number of agents that share the buffer")
    steps: PositiveInt = Field(1_000_000, description="environment steps of each agent")
    seed: NonNegativeInt = Field(0, description="the run's one seed; every random stream derives from it")
    log_every: PositiveInt = Field(1_000, description="environment steps between lines of metrics.jsonl")
    checkpoint_every: PositiveInt = Field(10_000, description="environment steps between checkpoints")
    threads: PositiveInt = Field(1, le=256, description="CPU threads of each learner's tensor operations")


class AgentConfig(Section):
    """The learning algorithm; the defaults are the paper's for TD3, `--algo` brings the others'."""

    algorithm: Algorithm = Field(
        "td3", description="the algorithm of every agent; alone it changes no other setting, `--algo` does"
    )
    hidden: tuple[PositiveInt, ...] = Field(
        (256, 256), min_length=1, description="units of the hidden layers"
    )
    actor_lr: PositiveFloat = Field(3e-4, description="Adam's learning rate for the actor")
    critic_lr: PositiveFloat = Field(3e-4, description="Adam's learning rate for the critics")
    critic_weight_decay: NonNegativeFloat = Field(
        0.0, description="factor of the L2 term that Adam adds to the critics' gradients"
    )
    gamma: float = Field(0.99, ge=0, lt=1, description="discount factor")
    tau: float = Field(5e-3, gt=0, le=1, description="target network step per update")
    batch_size: PositiveInt = Field(256, le=65_536, description="transitions per update")
    reward_scale: PositiveFloat = Field(
        1.0, description="what rewards are multiplied by in the critics' target; stored ones stay raw"
    )
    normalise_observations: bool = Field(
        False, description="whether the networks see observations normalised by running statistics"
    )
    start_steps: NonNegativeInt = Field(
        25_000, description="uniformly random steps of each agent before its first update"
    )
    exploration_noise: NonNegativeFloat = Field(
        0.1, description="standard deviation of the exploration noise, in normalised action units"
    )
    policy_delay: PositiveInt = Field(2, description="critic updates per actor update (td3 only)")
    target_noise: NonNegativeFloat = Field(
        0.2, description="standard deviation of the target policy's smoothing noise (td3 only)"
    )
    target_noise_clip: NonNegativeFloat = Field(0.5, description="bound of the smoothing noise (td3 only)")
    policy_noise: NonNegativeFloat = Field(
        0.1, description="standard deviation of the noise in the actions that an update samples (sac only)"
    )
    policy_noise_clip: NonNegativeFloat = Field(0.25, description="bound of the sampling noise (sac only)")

    @property
    def stored_before_updates(self) -> int:
        """Transitions an agent stores before its first update; an update needs at least one."""
        return max(self.start_steps, 1)


class DpsConfig(Section):
    """Deterministic policy similarity: how external transitions are weighted (docs/dps.md)."""

    divergence: Divergence = Field("jeffreys", description="the divergence ρ; λ = exp(−ρ)")
    scope: Scope = Field(
        "pooled",
        description="which rows share one λ: all external ones of a batch (`pooled`), those of one "
        "collecting agent (`agent`), or each its own (`transition`)",
    )
    reference_variance: PositiveFloat = Field(
        0.1, description="r, the variance of the reference Gaussian N(0, rI), in normalised action units"
    )
    floor: bool = Field(
        False, description="raise eigenvalues of Σ below r to r, so that agreement is not punished"
    )
    shrinkage: float = Field(0.0, ge=0, le=1, description="s; Σ becomes (1 − s) Σ + s r I")
    debias: bool = Field(
        False, description="subtract from ρ, down to 0, what equal Gaussians show at this number of rows"
    )
    normalise: bool = Field(False, description="divide ρ by n, the number of action dimensions")
    memory: float = Field(
        0.0,
        ge=0,
        description="half-life, in updates, of running moments of Σ and μ over the batches, for agents with "
        "few rows in each; 0 looks at each batch alone",
    )

    @model_validator(mode="after")
    def _memory_has_a_group(self) -> Self:
        if self.memory and self.scope == "transition":
            raise ValueError(
                f"memory = {self.memory:g} has no use with scope = transition, whose rows share nothing; "
                f"leave memory out"
            )
        return self

    @model_validator(mode="after")
    def _has_an_expectation(self) -> Self:
        if self.debias and (self.divergence, self.scope) == ("js", "transition"):
            raise ValueError(
                "debias = true is not known for divergence = js with scope = transition; leave debias out"
            )
        return self


class ReplayConfig(Section):
    """The shared replay buffer."""

    capacity: PositiveInt | str = Field(
        1_000_000, description='transitions kept, the oldest leaves first; or a size such as "512MiB"'
    )
    min_size: PositiveInt = Field(1, description="transitions present before the first batch is served")
    prefetch: PositiveInt = Field(
        2,
        le=64,
        description="batches the service may send ahead of their use; bounds how stale a batch can be",
    )

    @field_validator("capacity")
    @classmethod
    def _capacity_is_readable(cls, value: int | str) -> int | str:
        transitions(value, row_bytes=1)
        return int(value) if str(value).strip().isdecimal() else value


class EvalConfig(Section):
    """Evaluation: episodes without noise or updates, in fresh environments with fixed seeds."""

    every: PositiveInt = Field(1_000, description="environment steps between evaluations")
    episodes: PositiveInt = Field(10, le=1_000, description="episodes of one evaluation")
    max_episode_steps: PositiveInt = Field(
        10_000, description="steps after which an episode that does not end is cut"
    )


class MetricsConfig(Section):
    """The Prometheus endpoints."""

    port: int = Field(
        0,
        ge=0,
        le=65_535,
        description="port of the replay node's endpoint, learner i is at port + 1 + i; 0 is off",
    )


class RunConfig(Section):
    """Everything that decides a run. Immutable; made by `resolve` or `RunConfig()`."""

    env: EnvConfig = Field(default_factory=EnvConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    agent: AgentConfig = Field(default_factory=AgentConfig)
    dps: DpsConfig = Field(default_factory=DpsConfig)
    replay: ReplayConfig = Field(default_factory=ReplayConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    metrics: MetricsConfig = Field(default_factory=MetricsConfig)

    @model_validator(mode="after")
    def _sets_nothing_in_vain(self) -> Self:
        for key, reader in READ_BY_ONE.items():
            value, default = getattr(self.agent, key), AgentConfig.model_fields[key].default
            if reader != self.agent.algorithm and value != default:
                raise ValueError(
                    f"agent.{key} = {value} is read by {reader} only, and agent.algorithm is "
                    f"{self.agent.algorithm}; leave {key} out or choose {reader}"
                )
        return self

    @property
    def collected_before_updates(self) -> int:
        """Transitions that all agents together store before the first update of each."""
        return self.train.agents * self.agent.stored_before_updates

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if isinstance(self.replay.capacity, int):
            require_capacity(self, self.replay.capacity)
        first = self.collected_before_updates
        if self.replay.min_size > first:
            raise ValueError(
                f"replay.min_size = {self.replay.min_size} exceeds the {first} transitions that "
                f"{self.train.agents} agent(s) collect before their first update "
                f"(agent.start_steps = {self.agent.start_steps}), so no update would ever come; "
                f"set replay.min_size to at most {first}"
            )
        last_port = self.metrics.port + self.train.agents
        if self.metrics.port and last_port > 65_535:
            raise ValueError(
                f"metrics.port = {self.metrics.port} leaves no port for agent {self.train.agents - 1}"
            )
        return self


def whole_number(text: str) -> int | str:
    """The number that a text such as "100000", "100_000" or "1e5" is; the text where it is none."""
    try:
        return int(text)
    except ValueError:
        pass
    try:
        value = float(text)
    except ValueError:
        return text
    return int(value) if value.is_integer() and abs(value) < 2**53 else text


def require_capacity(config: RunConfig, capacity: int) -> None:
    """Checks what must fit into `capacity` transitions.

    Raises:
        ValueError: naming both settings (pydantic and `resolve` turn it into a ConfigError).
    """
    for key, value in (
        ("agent.batch_size", config.agent.batch_size),
        ("agent.start_steps", config.agent.start_steps),
        ("replay.min_size", config.replay.min_size),
    ):
        if value > capacity:
            raise ValueError(
                f"{key} = {value} exceeds replay.capacity = {capacity}; raise the capacity or lower {key}"
            )


def resolve(*layers: Mapping[str, Any]) -> RunConfig:
    """Merges nested mappings, later ones win, over the defaults.

    Raises:
        ConfigError: one sentence naming the key, the value and what is allowed.
    """
    merged: dict[str, Any] = {}
    for layer in layers:
        _merge(merged, layer)
    try:
        return RunConfig.model_validate(merged)
    except ValidationError as error:
        raise ConfigError(sentence(error, known=setting_names())) from None


def read_toml(path: Path) -> dict[str, Any]:
    """The settings in a TOML file; the tables a run directory adds (`versions`, `run`) are left out.

    Raises:
        ConfigError: the file is missing or is not TOML.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    return {key: value for key, value in values.items() if key not in ("versions", "run")}


def parse_assignments(assignments: Iterable[str]) -> dict[str, Any]:
    """Nested settings from `section.key=value` texts; a value is TOML, or else a plain string.

    Raises:
        ConfigError: a text without `=` or without a section.
    """
    nested: dict[str, Any] = {}
    for text in assignments:
        key, equals, value = text.partition("=")
        parts = [part.strip() for part in key.split(".")]
        if not equals or len(parts) < 2 or not all(parts):
            raise ConfigError(
                f"--set {text!r} is not of the form section.key=value, e.g. --set dps.divergence=kl"
            )
        branch: Any = _parse_value(value.strip())
        for part in reversed(parts):
            branch = {part: branch}
        _merge(nested, branch)
    return nested


def _parse_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
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


def setting_names() -> list[str]:
    """Every setting as `section.key`, in order."""
    return [
        f"{section}.{name}"
        for section, field in RunConfig.model_fields.items()
        for name in _section(field.annotation).model_fields
    ]


def _section(annotation: Any) -> type[BaseModel]:
    if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        raise TypeError(f"{annotation} is not a section of the configuration")
    return annotation
