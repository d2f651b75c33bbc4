"""The sections agent, dps and dpd: how one agent learns, and from whom."""

from collections.abc import Mapping
from typing import Annotated, Final, Literal, Self, get_args

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from dase_grpc.config.sections import Section

ALGORITHMS: Final = ("td3", "ddpg", "sac")
"""The algorithms that there are by name."""

ProductsKind = Literal["float32", "bfloat16"]

Units = Annotated[PositiveInt, Field(le=65_536)]
"""Of one layer; two such layers in a row take 17 GB for each copy of their weights."""

READ_BY_ONE: Final[Mapping[str, str]] = {
    "policy_delay": "td3",
    "target_noise": "td3",
    "target_noise_clip": "td3",
    "policy_noise": "sac",
    "policy_noise_clip": "sac",
}
"""The settings of `agent` that one algorithm alone reads; the others refuse a value but the default.

One of the user's own may read any.
"""

Divergence = Literal["jeffreys", "js", "kl", "none", "isolated"]
Scope = Literal["pooled", "agent", "transition"]
DIVERGENCES: Final[tuple[str, ...]] = get_args(Divergence)
SCOPES: Final[tuple[str, ...]] = get_args(Scope)

SIMILARITY: Final = "similarity"
MEASURES: Final[Mapping[str, frozenset[str]]] = {
    SIMILARITY: frozenset(
        ("divergence", "scope", "reference_variance", "floor", "shrinkage", "debias", "normalise", "memory")
    ),
    "relative": frozenset(("normalise",)),
    "relative_rows": frozenset(),
    "advantage": frozenset(),
}
"""The measures that there are by name, and the options of section `dps` that each reads."""

LARGEST: Final = 1e30
"""Of a factor: sums over a batch of what it weighs are numbers in float32 still."""

States = Literal["disadvantageous", "all"]


def is_own(name: str) -> bool:
    """Whether the name of an algorithm or a measure is an import path, of one of the user's."""
    return ":" in name


def algorithm_name(algorithm: str) -> str:
    """What people call an algorithm: TD3, or one of the user's by its path."""
    return algorithm if is_own(algorithm) else algorithm.upper()


class AgentConfig(Section):
    """The learning algorithm; the defaults are the paper's for TD3, `--algo` brings the others'."""

    algorithm: str = Field(
        "td3",
        description="the learning algorithm: `td3`, `ddpg`, `sac`, or `package.module:Class` of your own "
        "(docs/agents.md); alone it changes no other setting, `--algo` does",
    )
    hidden: tuple[Units, ...] = Field((256, 256), min_length=1, description="units of the hidden layers")
    actor_lr: PositiveFloat = Field(3e-4, description="Adam's learning rate for the actor")
    critic_lr: PositiveFloat = Field(3e-4, description="Adam's learning rate for the critics")
    critic_weight_decay: NonNegativeFloat = Field(
        0.0, description="factor of the L2 term that Adam adds to the critics' gradients"
    )
    gamma: float = Field(0.99, ge=0, lt=1, description="discount factor")
    n_step: PositiveInt = Field(
        1,
        le=1_000,
        description="rewards that a stored transition sums up before the critics' target bootstraps, fewer "
        "where the episode ends",
    )
    tau: float = Field(5e-3, gt=0, le=1, description="target network step per update")
    batch_size: PositiveInt = Field(256, le=65_536, description="transitions per update")
    reward_scale: PositiveFloat = Field(
        1.0,
        le=LARGEST,
        description="what rewards are multiplied by in the critics' target; stored ones stay raw",
    )
    normalise_observations: bool = Field(
        False, description="whether the networks see observations normalised by running statistics"
    )
    start_steps: NonNegativeInt = Field(
        25_000, description="uniformly random steps of each agent before its first update"
    )
    exploration_noise: NonNegativeFloat = Field(
        0.1,
        le=LARGEST,
        description="standard deviation of the exploration noise, in normalised action units",
    )
    products: ProductsKind = Field(
        "float32",
        description="what an update's large matrix products multiply, those of layers with at least 96 "
        "inputs and 96 outputs; bfloat16 takes less time on CPUs that have it, and is less precise",
    )
    policy_delay: PositiveInt = Field(2, description="critic updates per actor update (td3 only)")
    target_noise: NonNegativeFloat = Field(
        0.2, le=LARGEST, description="standard deviation of the target policy's smoothing noise (td3 only)"
    )
    target_noise_clip: NonNegativeFloat = Field(
        0.5, le=LARGEST, description="bound of the smoothing noise (td3 only)"
    )
    policy_noise: NonNegativeFloat = Field(
        0.1,
        le=LARGEST,
        description="standard deviation of the noise in the actions that an update samples (sac only)",
    )
    policy_noise_clip: NonNegativeFloat = Field(
        0.25, le=LARGEST, description="bound of the sampling noise (sac only)"
    )

    @property
    def stored_before_updates(self) -> int:
        """Transitions an agent stores before its first update; an update needs at least one."""
        return max(self.start_steps, 1)

    @model_validator(mode="after")
    def _sets_nothing_in_vain(self) -> Self:
        if is_own(self.algorithm):
            return self
        if self.algorithm not in ALGORITHMS:
            raise ValueError(
                f"algorithm = {self.algorithm!r} is not one of {', '.join(ALGORITHMS)}; name one of these, "
                f"or one of your own as package.module:Class"
            )
        for key, reader in READ_BY_ONE.items():
            value, default = getattr(self, key), AgentConfig.model_fields[key].default
            if reader != self.algorithm and value != default:
                raise ValueError(
                    f"{key} = {value} is read by {reader} only, and algorithm is "
                    f"{self.algorithm}; leave {key} out or choose {reader}"
                )
        return self


class DpsConfig(Section):
    """Deterministic policy similarity: how external transitions are weighted (docs/dps.md)."""

    measure: str = Field(
        SIMILARITY,
        description="what weighs external rows: the similarity that the other settings describe, `relative`, "
        "`relative_rows`, `advantage` (docs/dps.md), or `package.module:name` of your own (docs/measures.md)",
    )
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

    @property
    def is_paper(self) -> bool:
        """Whether λ is the paper's, by whatever reference variance."""
        return self == DpsConfig(reference_variance=self.reference_variance)

    @property
    def regularised(self) -> bool:
        """Whether Σ is changed before it is judged, so that any number of rows will do."""
        return self.floor or self.shrinkage > 0

    @model_validator(mode="after")
    def _sets_nothing_in_vain(self) -> Self:
        read = MEASURES.get(self.measure)
        if read is None and not is_own(self.measure):
            raise ValueError(
                f"measure = {self.measure!r} is not one of {', '.join(MEASURES)}; name one of these, or one "
                f"of your own as package.module:name"
            )
        for key, field in DpsConfig.model_fields.items():
            value = getattr(self, key)
            if read is not None and key not in read and key != "measure" and value != field.default:
                raise ValueError(f"{key} = {value} is not read by measure = {self.measure}; leave one out")
        return self

    @model_validator(mode="after")
    def _has_what_it_is_computed_from(self) -> Self:
        if self.memory and self.scope == "transition":
            raise ValueError(
                f"memory = {self.memory:g} has no use with scope = transition, whose rows share nothing; "
                f"leave memory out"
            )
        if self.debias and (self.divergence, self.scope) == ("js", "transition"):
            raise ValueError(
                "debias = true is not known for divergence = js with scope = transition; leave debias out"
            )
        return self


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
