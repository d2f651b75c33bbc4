"""The settings of one agent's learning algorithm."""

from collections.abc import Mapping
from typing import Final, Literal, Self, get_args

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from dase_grpc.config.sections import Section

Algorithm = Literal["td3", "ddpg", "sac"]
ALGORITHMS: Final[tuple[str, ...]] = get_args(Algorithm)
ProductsKind = Literal["float32", "bfloat16"]

READ_BY_ONE: Final[Mapping[str, str]] = {
    "policy_delay": "td3",
    "target_noise": "td3",
    "target_noise_clip": "td3",
    "policy_noise": "sac",
    "policy_noise_clip": "sac",
}
"""The settings of `agent` that one algorithm alone reads; the others refuse a value but the default."""


class AgentConfig(Section):
    """The learning algorithm; the defaults are the paper's for TD3, `--algo` brings the others'."""

    algorithm: Algorithm = Field(
        "td3", description="the learning algorithm; alone it changes no other setting, `--algo` does"
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
    products: ProductsKind = Field(
        "float32",
        description="what an update's large matrix products multiply, those of layers with at least 96 "
        "inputs and 96 outputs; bfloat16 takes less time on CPUs that have it, and is less precise",
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

    @model_validator(mode="after")
    def _sets_nothing_in_vain(self) -> Self:
        for key, reader in READ_BY_ONE.items():
            value, default = getattr(self, key), AgentConfig.model_fields[key].default
            if reader != self.algorithm and value != default:
                raise ValueError(
                    f"{key} = {value} is read by {reader} only, and algorithm is "
                    f"{self.algorithm}; leave {key} out or choose {reader}"
                )
        return self
