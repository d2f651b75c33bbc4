"""The latest policy of each agent: opaque bytes with a version, replaced as a whole or not at all."""

import hashlib
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from dase_grpc.errors import CapacityError, MalformedError, StalePolicyError

MAX_POLICY_BYTES: Final = 256 * 2**20
MAX_BOARD_BYTES: Final = 2 * 2**30
"""All policies of a run together, those that are arriving included."""

DIGEST_BYTES: Final = 32
MAX_VERSION: Final = 2**63 - 1

Age = tuple[int, int, int]
"""Epoch, version, step."""


@dataclass(frozen=True)
class PolicyBytes:
    """One agent's policy as it was after `version` training iterations, published in a lease's epoch.

    Attributes:
        step: environment steps the agent had had; 0 where it is not known.
    """

    agent_id: int
    epoch: int
    version: int
    sha256: bytes
    payload: bytes
    step: int = 0

    @classmethod
    def of(cls, payload: bytes, *, agent_id: int, epoch: int, version: int, step: int = 0) -> "PolicyBytes":
        """A policy with the digest of its bytes."""
        return cls(agent_id, epoch, version, hashlib.sha256(payload).digest(), payload, step)

    @property
    def age(self) -> Age:
        """Grows with each newer policy of an agent: a later epoch counts more than any version.

        An agent that only explores has the same policy at later steps, which is newer too.
        """
        return self.epoch, self.version, self.step


@dataclass(kw_only=True, eq=False)
class IncomingPolicy:
    """A policy that arrives in pieces; it is one only if size and digest are those it was announced with.

    Takes memory as the pieces come, at most the announced size.
    """

    agent_id: int
    epoch: int
    version: int
    size: int
    sha256: bytes
    step: int = 0

    def __post_init__(self) -> None:
        require_size(self.size)
        if not 0 <= self.version <= MAX_VERSION:
            raise MalformedError(f"policy version {self.version} is outside 0..{MAX_VERSION}")
        if not 0 <= self.step <= MAX_VERSION:
            raise MalformedError(f"step {self.step} of a policy is outside 0..{MAX_VERSION}")
        if len(self.sha256) != DIGEST_BYTES:
            raise MalformedError(f"a SHA-256 digest has {DIGEST_BYTES} bytes, not {len(self.sha256)}")
        self._bytes = bytearray()
        self._digest = hashlib.sha256()
        self._dropped = False

    @property
    def age(self) -> Age:
        """See PolicyBytes."""
        return self.epoch, self.version, self.step

    @property
    def held_bytes(self) -> int:
        """Bytes that have arrived and are kept."""
        return len(self._bytes)

    @property
    def whole(self) -> bool:
        """Whether as many bytes are there as were announced."""
        return len(self._bytes) == self.size

    def add(self, piece: bytes) -> None:
        """Takes the next bytes; a MalformedError where they are more than was announced, or none."""
        self.require_kept()
        if not 0 < len(piece) <= self.size - len(self._bytes):
            raise MalformedError(
                f"a policy announced with {self.size} bytes got {len(piece)} more after {len(self._bytes)}"
            )
        self._bytes += piece
        self._digest.update(piece)

    def finish(self) -> PolicyBytes:
        """The policy, once; a MalformedError where bytes are missing, or not those the digest was made of."""
        self.require_kept()
        if not self.whole:
            raise MalformedError(f"the policy ended after {len(self._bytes)} of {self.size} bytes")
        if self._digest.digest() != self.sha256:
            raise MalformedError(
                f"the {self.size} bytes of agent {self.agent_id}'s policy {self.version} do not have the "
                f"SHA-256 digest it was announced with; send it again"
            )
        payload = bytes(self._bytes)
        self.drop()
        return PolicyBytes(self.agent_id, self.epoch, self.version, self.sha256, payload, self.step)

    def drop(self) -> None:
        """Gives its memory back; nothing can be added any more."""
        self._dropped = True
        self._bytes = bytearray()

    def require_kept(self) -> None:
        """Checks that it may still become a policy: no later Publish of the agent took its place."""
        if self._dropped:
            raise StalePolicyError(
                f"policy {self.version} of agent {self.agent_id} was given up: another Publish stream of "
                f"the agent has begun since; keep to one at a time"
            )


class PolicyBoard:
    """Holds the latest policy of each agent, and the one that is arriving, up to `max_bytes` in all.

    Knows who is followed. Who may publish for an agent is the caller's to check. Policies of agents that left
    stay.
    """

    def __init__(self, *, max_bytes: int = MAX_BOARD_BYTES) -> None:
        self._max_bytes = max_bytes
        self._latest: dict[int, PolicyBytes] = {}
        self._incoming: dict[int, IncomingPolicy] = {}
        self._followers: Counter[int | None] = Counter()

    @property
    def versions(self) -> dict[int, int]:
        """The version of each agent's latest policy; may be read from another thread."""
        return {policy.agent_id: policy.version for policy in list(self._latest.values())}

    @property
    def incoming_bytes(self) -> int:
        """Bytes of policies that have not arrived whole."""
        return sum(policy.held_bytes for policy in self._incoming.values())

    @property
    def held_bytes(self) -> int:
        """Bytes of all policies, those that have not arrived whole included."""
        return self.incoming_bytes + sum(len(policy.payload) for policy in self._latest.values())

    def agents(self) -> list[int]:
        """The ids of the agents that have a policy, in order."""
        return sorted(self._latest)

    def latest(self, agent_id: int) -> PolicyBytes | None:
        """An agent's policy, if it has published one."""
        return self._latest.get(agent_id)

    def followers(self, agent_id: int) -> int:
        """How many want an agent's policy now, those who want every agent's included."""
        return self._followers[agent_id] + self._followers[None]

    @contextmanager
    def following(self, agent_ids: Collection[int]) -> Iterator[None]:
        """Somebody wants the policies of these agents, none meaning all, for as long as the block runs."""
        wanted: set[int | None] = {*agent_ids} or {None}
        self._followers.update(wanted)
        try:
            yield
        finally:
            self._followers -= Counter(wanted)

    @contextmanager
    def arriving(self, incoming: IncomingPolicy) -> Iterator[IncomingPolicy]:
        """Holds a policy that pieces are added to; what has arrived is dropped when the block ends.

        It takes the place of the agent's policy that is still arriving, if there is one.
        """
        agent_id = incoming.agent_id
        self._require_newer(incoming)
        self._require_room(agent_id, incoming.size)
        if (other := self._incoming.get(agent_id)) is not None:
            other.drop()
        self._incoming[agent_id] = incoming
        try:
            yield incoming
        finally:
            incoming.drop()
            if self._incoming.get(agent_id) is incoming:
                del self._incoming[agent_id]

    def publish(self, policy: PolicyBytes) -> bool:
        """Makes a policy its agent's latest; returns whether it was not that already.

        Raises:
            StalePolicyError: the agent has a newer one, or another one of the same version.
        """
        if not self._require_newer(policy):
            return False
        self._latest[policy.agent_id] = policy
        return True

    def _require_room(self, agent_id: int, size: int) -> None:
        announced = sum(policy.size for agent, policy in self._incoming.items() if agent != agent_id)
        held = sum(len(policy.payload) for policy in self._latest.values())
        if held + announced + size > self._max_bytes:
            raise CapacityError(
                f"the policies of all agents would take {held + announced + size} bytes, over the limit of "
                f"{self._max_bytes}; publish smaller ones, or with fewer agents"
            )

    def _require_newer(self, policy: PolicyBytes | IncomingPolicy) -> bool:
        """Whether it is newer than the agent's latest; if not, it has to be the very same."""
        held = self._latest.get(policy.agent_id)
        if held is None or policy.age[:2] > held.age[:2]:
            return True
        same_version = policy.age[:2] == held.age[:2]
        if same_version and policy.sha256 == held.sha256:
            return policy.step > held.step
        which = "another one" if same_version else "a newer one"
        raise StalePolicyError(
            f"policy {policy.version} of agent {policy.agent_id} (epoch {policy.epoch}) cannot be published: "
            f"{which}, version {held.version} (epoch {held.epoch}), was; versions have to grow"
        )


def require_size(size: int) -> None:
    """Checks the size of a policy."""
    if not 1 <= size <= MAX_POLICY_BYTES:
        raise MalformedError(f"a policy has 1 to {MAX_POLICY_BYTES} bytes, not {size}")
