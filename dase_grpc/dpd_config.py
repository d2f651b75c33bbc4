"""The settings of dual policy distillation."""

from typing import Final, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from dase_grpc.config.sections import Section

LARGEST: Final = 1e30
"""Of a factor: sums over a batch of what it weighs are numbers in float32 still."""

States = Literal["disadvantageous", "all"]


class DpdConfig(Section):
    """Dual policy distillation: how a pair learns from each other's policies (docs/algorithms.md)."""

    alpha: NonNegativeFloat = Field(
        0.75,
        le=LARGEST,
        description="α; a state weighs exp(α (V_peer − V_own)), values in the environment's rewards",
    )
    max_confidence: float = Field(
        100.0, ge=1, le=LARGEST, description="c; the weight of a state is clipped to the range from 1/c to c"
    )
    states: States = Field(
        "disadvantageous",
        description="the states distilled on: those where the peer's value is higher "
        "(`disadvantageous`), or `all`, which leaves it to the weights",
    )
    distil_every: PositiveInt = Field(1, description="updates between two distillations")
    lr_factor: PositiveFloat = Field(
        1.0,
        le=LARGEST,
        description="Adam's learning rate for the distillation, as a multiple of agent.actor_lr",
    )
    publish_every: PositiveInt = Field(
        100, description="updates between two publications of an agent's actor and critic"
    )
