"""The settings of deterministic policy similarity, section `dps`."""

from typing import Final, Literal, Self, get_args

from pydantic import Field, PositiveFloat, model_validator

from dase_grpc.config.sections import Section

Divergence = Literal["jeffreys", "js", "kl", "none", "isolated"]
Scope = Literal["pooled", "agent", "transition"]
DIVERGENCES: Final[tuple[str, ...]] = get_args(Divergence)


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
