"""The settings of a run as a whole, section `train`."""

from collections.abc import Mapping
from typing import Any, Final, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from dase_grpc.config.sections import Section, whole_number
from dase_grpc.pace import deadlock

Method = Literal["dase", "dpd"]
SINGLE: Final = "single"
"""What the paper calls one agent alone."""

MAX_AGENTS: Final = 1024


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
        if whole_number(str(agents)) != 1:
            raise ValueError(
                f"method = {SINGLE} trains one agent, and train.agents = {agents}; "
                f"set it to 1, or leave one of them out"
            )
        return {**values, "method": "dase", "agents": 1}

    @model_validator(mode="after")
    def _can_have_its_updates_so(self) -> Self:
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
        return self

    @model_validator(mode="after")
    def _sets_no_pace_in_vain(self) -> Self:
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
