"""The settings of showing an agent's policy to others, section `policy`."""

from pydantic import Field, PositiveInt

from dase_grpc.config.sections import Section


class PolicyConfig(Section):
    """Showing an agent's policy to actors and evaluators, which a learner does while somebody follows it."""

    publish_every: PositiveInt = Field(
        50,
        description="updates between two publications of a policy that somebody follows; it is published at "
        "each step with an evaluation due as well. A pair (`dpd`) goes by dpd.publish_every",
    )
