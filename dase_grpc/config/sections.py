"""The sections env, train, replay, eval, policy and metrics, and what all sections share."""

import math
import reprlib
from collections.abc import Mapping
from datetime import date, time
from typing import Any, Final, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from dase_grpc.config.texts import INTEGER_LIMIT, leaves, toml_tables, transitions
from dase_grpc.pace import deadlock

Method = Literal["dase", "dpd"]
SINGLE: Final = "single"
"""What the paper calls one agent alone."""

MAX_AGENTS: Final = 1024

Storage = Literal["disk", "memory"]
EvaluatedBy = Literal["learner", "evaluator"]


class Section(BaseModel):
    """A frozen group of settings that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, ser_json_inf_nan="constants")

    @field_validator("*", mode="before")
    @classmethod
    def _is_read_as_it_is_meant(cls, value: Any, info: ValidationInfo) -> Any:
        """A text for a whole number may be written as 1e5 or 100_000, as a number in TOML may.

        Where a number or a text is wanted, pydantic would read true and false as 1 and 0.
        """
        wanted = cls.model_fields[str(info.field_name)].annotation
        if isinstance(value, bool) and wanted is not bool:
            raise PydanticCustomError("boolean", "must not be true or false")
        if isinstance(value, str) and wanted is int:
            value = whole_number(value)
        numbers = leaves(value) if isinstance(value, (int, list, tuple)) else ()
        if not all(-INTEGER_LIMIT <= each < INTEGER_LIMIT for each in numbers if isinstance(each, int)):
            raise PydanticCustomError("too_large", "is too large")
        return value


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


class TrainConfig(Section):
    """The run as a whole. `method = "single"` is read as one agent of the method `dase`."""

    method: Method = Field(
        "dase",
        description="how agents learn from each other: by shared experience (`dase`; with one agent it is a "
        "single agent), or as a pair that distils policies (`dpd`); `single` may be written for `dase` with "
        "`train.agents` = 1",
    )
    agents: PositiveInt = Field(2, le=MAX_AGENTS, description="K, the number of agents that share the buffer")
    steps: PositiveInt = Field(1_000_000, description="environment steps of each agent")
    seed: NonNegativeInt = Field(0, description="the run's one seed; every random stream derives from it")
    log_every: PositiveInt = Field(1_000, description="environment steps between lines of metrics.jsonl")
    checkpoint_every: PositiveInt = Field(10_000, description="environment steps between checkpoints")
    explore: bool = Field(
        True,
        description="whether each learner steps an environment itself; if not, its agent's actors collect "
        "all transitions, and train.steps counts theirs",
    )
    actors: NonNegativeInt = Field(
        0,
        le=64,
        description="actor nodes of each agent that `dase train` starts (train.explore = false only)",
    )
    updates_per_step: PositiveFloat = Field(
        1.0, description="updates for each environment step of an agent's actors (train.explore = false only)"
    )
    step_error_buffer: PositiveInt = Field(
        1_000,
        description="environment steps that an agent's actors may be ahead of its updates, then they wait "
        "(train.explore = false only); at least 1 + 1 / train.updates_per_step",
    )
    threads: PositiveInt = Field(1, le=256, description="CPU threads of each learner's tensor operations")

    cuda_graph: bool = Field(
        False,
        description="on a GPU, whether a whole update is recorded once and replayed as one CUDA graph "
        "(method `dase` only); changes nothing on a CPU, and has not been run on a GPU yet",
    )
    overlap: bool = Field(
        False,
        description="whether a learner acts by its policy before the latest update, so that on a GPU "
        "environment steps and updates overlap; the policy is then always one update old "
        "(train.explore = true only)",
    )

    @model_validator(mode="before")
    @classmethod
    def _reads_single(cls, values: Any) -> Any:
        if not isinstance(values, Mapping) or values.get("method") != SINGLE:
            return values
        agents = values.get("agents", 1)
        count = whole_number(str(agents))
        if isinstance(count, int) and count != 1:
            raise ValueError(
                f"method = {SINGLE} trains one agent, and train.agents = {agents}; "
                f"set it to 1, or leave one of them out"
            )
        return {**values, "method": "dase", "agents": agents}

    @model_validator(mode="after")
    def _can_explore_and_update_so(self) -> Self:
        if self.cuda_graph and self.method == "dpd":
            raise ValueError(
                "cuda_graph = true records updates of train.method = dase only, for those of dpd depend on "
                "what a peer has shown; leave train.cuda_graph out"
            )
        if self.overlap and not self.explore:
            raise ValueError(
                "overlap = true is read with train.explore = true only, for an agent's actors follow "
                "policies as they are published; leave train.overlap out"
            )
        for key in ("actors", "updates_per_step", "step_error_buffer"):
            value, default = getattr(self, key), TrainConfig.model_fields[key].default
            if self.explore and value != default:
                raise ValueError(
                    f"{key} = {value} is read with explore = false only, where an agent's actors collect its "
                    f"transitions; leave {key} out, or set explore = false"
                )
        if not self.explore and (problem := deadlock(self.updates_per_step, self.step_error_buffer)):
            raise ValueError(problem)
        return self


class PolicyConfig(Section):
    """Showing an agent's policy to actors and evaluators, which a learner does while somebody follows it."""

    publish_every: PositiveInt = Field(
        50,
        description="updates between two publications of a policy that somebody follows; it is published at "
        "each step with an evaluation due as well. A pair (`dpd`) goes by dpd.publish_every",
    )


class EnvConfig(Section):
    """The environment every agent explores its own copy of."""

    id: str = Field(
        "InvertedDoublePendulum-v5",
        min_length=1,
        description="Gymnasium id, `package:Name-v0` where another package registers it, or "
        "`package.module:EnvOrFactory`",
    )
    max_restarts: NonNegativeInt = Field(
        5,
        description="times that an environment which raises is made anew without an episode that ended, or "
        "1000 good steps, in between",
    )
    timeout_s: float = Field(
        120.0,
        ge=0,
        description="seconds after which a call into an environment that has not returned ends the process; "
        "0 is never",
    )
    kwargs: dict[str, Any] = Field(
        default_factory=dict, description="keyword arguments for making the environment"
    )

    @field_validator("kwargs")
    @classmethod
    def _kwargs_can_be_kept(cls, value: dict[str, Any]) -> dict[str, Any]:
        """They are compared, and are from the start what run.toml gives back: tuples are lists."""
        import tomli_w  # which the image of a replay is without, and needs no environment

        try:
            kept = toml_tables(tomli_w.dumps(value))
        except (TypeError, AttributeError, ValueError, RecursionError):
            raise ValueError(
                f"{reprlib.repr(value)} cannot be kept in run.toml; give texts, true and false, numbers of "
                f"at most 64 bits, and lists and tables of these"
            ) from None
        if dates := [leaf for leaf in leaves(kept) if isinstance(leaf, (date, time))]:
            raise ValueError(f"{dates[0]} is a date or a time, which no environment is given; give a text")
        for leaf in leaves(kept):
            if isinstance(leaf, float) and math.isnan(leaf):
                raise ValueError("NaN equals nothing, not even itself; give a number")
            if isinstance(leaf, str) and leaf.encode(errors="ignore").decode() != leaf:
                raise ValueError(f"{leaf!r} cannot be written as UTF-8; give another text")
        return kept


class ReplayConfig(Section):
    """The shared replay buffer."""

    capacity: PositiveInt | str = Field(
        1_000_000, description='transitions kept, the oldest leaves first; or a size such as "512MiB"'
    )
    min_size: PositiveInt = Field(1, description="transitions present before the first batch is served")
    prefetch: PositiveInt = Field(
        16,
        le=64,
        description="batches the service may send ahead of their use; bounds how stale a batch can be",
    )
    own_share: float | Literal["uniform"] = Field(
        "uniform",
        description="share of each batch that is the agent's own transitions, the rest being all others'; "
        "`uniform` draws from all alike",
    )
    sampling: Literal["uniform", "prioritised"] = Field(
        "uniform",
        description="how transitions are drawn: each as likely as any other, or in proportion to priorities "
        "that each agent has of its own (`prioritised`, section priorities)",
    )
    storage: Storage = Field(
        "disk",
        description="where `dase train` keeps the buffer of its replay process: in the run's folder (`disk`, "
        "on Linux), so that it outlives the process, or in `memory`; lockstep does not read it, nor does "
        "`dase node`, which has `--data-dir`",
    )

    in_place: bool = Field(
        True,
        description="whether a learner on the replay's own machine, of the same user, reads rows from the "
        "buffer in place instead of over the stream; lockstep does not read it",
    )

    @field_validator("capacity")
    @classmethod
    def _capacity_is_readable(cls, value: int | str) -> int | str:
        transitions(value, row_bytes=1)
        return int(value) if str(value).strip().isdecimal() else value

    @field_validator("own_share", mode="before")
    @classmethod
    def _own_share_is_a_share(cls, value: Any) -> Any:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if value != "uniform" and not (number and 0 <= value <= 1):
            raise ValueError('must be a share from 0 to 1, or "uniform"')
        return value


class PrioritiesConfig(Section):
    """Prioritised sampling: how TD errors become probabilities and weights (`replay.sampling`)."""

    alpha: float = Field(
        0.6, ge=0, le=1, description="α; a transition is drawn in proportion to (|TD error| + epsilon) ^ α"
    )
    beta: float = Field(
        0.4,
        ge=0,
        le=1,
        description="β at the first step; a transition weighs (size · probability) ^ −β over the largest of "
        "its batch",
    )
    beta_final: float = Field(1.0, ge=0, le=1, description="β at the last step; in between it grows evenly")
    epsilon: float = Field(1e-6, ge=0, le=1e30, description="added to each |TD error|")
    uniform_share: float = Field(
        0.0, ge=0, le=1, description="share of draws that are uniform whatever the priorities"
    )


class EvalConfig(Section):
    """Evaluation: episodes without noise or updates, in fresh environments with fixed seeds."""

    every: PositiveInt = Field(1_000, description="environment steps between evaluations")
    by: EvaluatedBy = Field(
        "learner",
        description="who evaluates: each `learner` itself, or an `evaluator` node, to be started beside them",
    )
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
        description="port of the replay node's endpoint, learner i is at port + 1 + i, and actor j of agent "
        "i, with train.actors, at port + 1 + agents + i · actors + j; 0 is off",
    )
