"""The identity that a node's credentials show: a role and, for some roles, the agent it acts as."""

import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Self

from dase_grpc.config.texts import shown
from dase_grpc.errors import CredentialsError
from dase_grpc.progress import MAX_AGENT_ID

PREFIX: Final = "spiffe://dase/"

TLS_VARIABLE: Final = "DASE_TLS"
TOKENS_VARIABLE: Final = "DASE_TOKENS"
TOKEN_FILE_VARIABLE: Final = "DASE_TOKEN_FILE"
CRL_VARIABLE: Final = "DASE_CRL"
VARIABLES: Final = (TLS_VARIABLE, TOKENS_VARIABLE, TOKEN_FILE_VARIABLE, CRL_VARIABLE)
"""Of the environment: where a node's credentials lie, if its command line does not say."""

_IDENTITY: Final = re.compile(r"(?P<role>[a-z]+)(?:/(?P<agent>0|[1-9][0-9]{0,3}))?")


class Role(StrEnum):
    """What kind of node it is; a label of metrics, so their number is fixed."""

    REPLAY = "replay"
    LEARNER = "learner"
    ACTOR = "actor"
    EVALUATOR = "evaluator"
    OBSERVER = "observer"
    CLIENT = "client"


OF_AN_AGENT: Final = frozenset({Role.LEARNER, Role.ACTOR})
"""The roles that act as an agent."""


def without_credentials(variables: Mapping[str, str]) -> dict[str, str]:
    """An environment for a process that shall show none."""
    return {name: value for name, value in variables.items() if name not in VARIABLES}


@dataclass(frozen=True)
class Identity:
    """A role; `agent_id` is the only agent it may act as, None any."""

    role: Role
    agent_id: int | None = None

    def __str__(self) -> str:
        return self.role if self.agent_id is None else f"{self.role}/{self.agent_id}"

    @property
    def uri(self) -> str:
        """What stands in a certificate as its subject alternative name."""
        return f"{PREFIX}{self}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads `learner/3` or `spiffe://dase/learner/3`; what is neither is a CredentialsError."""
        match = _IDENTITY.fullmatch(text.removeprefix(PREFIX))
        if match is None or match["role"] not in set(Role):
            raise CredentialsError(
                f"{reprlib.repr(text)} is no identity; write a role ({', '.join(Role)}), a learner or an "
                f"actor with its agent id, e.g. learner/3"
            )
        return cls.of(match["role"], None if match["agent"] is None else int(match["agent"]))

    @classmethod
    def of(cls, role: str, agent_id: int | None = None) -> Self:
        """The identity of a role and an agent id; a CredentialsError where there is none."""
        if role not in set(Role):
            raise CredentialsError(f"{reprlib.repr(role)} is no role; the roles are {', '.join(Role)}")
        if agent_id is not None and role not in OF_AN_AGENT:
            raise CredentialsError(f"a node of role {role} acts as no agent; leave the agent id out")
        if agent_id is not None and not 0 <= agent_id <= MAX_AGENT_ID:
            raise CredentialsError(f"there is no agent {shown(agent_id)}; agent ids are 0..{MAX_AGENT_ID}")
        return cls(Role(role), agent_id)

    def may_act_as(self, agent_id: int) -> bool:
        """Whether it may speak for this agent."""
        return self.agent_id is None or self.agent_id == agent_id
