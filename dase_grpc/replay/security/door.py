"""The door of a service: who calls, what a caller of each role may do, which handshakes failed."""

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

from dase_grpc.errors import CredentialsError, NotPermittedError, OverloadedError, UnauthenticatedError
from dase_grpc.replay.security.identity import PREFIX, Identity, Role
from dase_grpc.replay.security.tokens import TOKEN_KEY, BadToken, TokenBook
from dase_grpc.replay.wire.messages import shown
from dase_grpc.replay.wire.status import Context

EVERYBODY: Final = frozenset(Role)
LEARNERS: Final = frozenset({Role.LEARNER})
EXPLORERS: Final = frozenset({Role.LEARNER, Role.ACTOR})
ATTENDANTS: Final = frozenset({Role.ACTOR, Role.EVALUATOR})
READERS: Final = frozenset({Role.LEARNER, Role.ACTOR, Role.EVALUATOR})

PERMISSIONS: Final[Mapping[str, frozenset[Role]]] = {
    "/dase.v1.ReplayService/Insert": EXPLORERS,
    "/dase.v1.ReplayService/Sample": LEARNERS,
    "/dase.v1.ReplayService/Describe": READERS,
    "/dase.v1.ClusterService/Join": LEARNERS,
    "/dase.v1.ClusterService/Heartbeat": LEARNERS,
    "/dase.v1.ClusterService/Leave": LEARNERS,
    "/dase.v1.ClusterService/Attend": ATTENDANTS,
    "/dase.v1.ClusterService/Status": EVERYBODY,
    "/dase.v1.PolicyService/Publish": LEARNERS,
    "/dase.v1.PolicyService/Subscribe": READERS,
    "/grpc.health.v1.Health/Check": EVERYBODY,
    "/grpc.health.v1.Health/List": EVERYBODY,
    "/grpc.health.v1.Health/Watch": EVERYBODY,
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo": frozenset({Role.OBSERVER}),
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": frozenset({Role.OBSERVER}),
}
"""Who may call what; a method that is not here, nobody."""

SAY_EVERY_S: Final = 10.0
"""Of each reason for which callers are refused, one line in this time."""

log = logging.getLogger("dase")

FAILED_AFTER_S: Final = 11.0
"""A connection without a call for so long has failed: a handshake may take 10 s."""

FORGOTTEN_AFTER_S: Final = 65.0
"""An address without a call for so long may be another connection's: idle ones are closed after 60 s."""

MAX_PENDING: Final = 65_536


class Denial(StrEnum):
    """Why a caller is refused; a label of a metric, so their number is fixed."""

    HANDSHAKE = "handshake"
    NO_IDENTITY = "no_identity"
    NO_TOKEN = "no_token"
    MALFORMED_TOKEN = "malformed_token"
    UNKNOWN_TOKEN = "unknown_token"
    STALE_TOKEN = "stale_token"
    REPLAYED_TOKEN = "replayed_token"
    TOO_MANY_TOKENS = "too_many_tokens"
    ROLE = "role"
    AGENT = "agent"


class Authenticator(Protocol):
    """Says who makes a call."""

    def __call__(self, method: str, context: Context) -> Identity:
        """The caller.

        Raises:
            BadToken: it has not shown who it is.
            OverloadedError: more calls than are taken.
        """


def from_certificate(method: str, context: Context) -> Identity:
    """The caller as its certificate, which the handshake has checked, says; see Authenticator."""
    uris = [uri.decode(errors="replace") for uri in context.auth_context().get("peer_uri", ())]
    ours = [uri for uri in uris if uri.startswith(PREFIX)]
    try:
        if len(ours) == 1:
            return Identity.parse(ours[0])
    except CredentialsError:
        pass
    raise BadToken(
        Denial.NO_IDENTITY,
        f"the certificate of this node does not say who it is: it needs one URI such as {PREFIX}learner/3 "
        f"among its alternative names; issue it with `dase certs issue`",
    )


def from_token(book: TokenBook) -> Authenticator:
    """The caller as the token of the call says."""

    def authenticate(method: str, context: Context) -> Identity:
        tokens = [value for key, value in context.invocation_metadata() or () if key == TOKEN_KEY]
        if len(tokens) != 1 or not isinstance(tokens[0], str):
            raise BadToken(
                Denial.NO_TOKEN,
                "this replay service takes calls with a token only; give one with --token-file",
            )
        return book.check(method, tokens[0])

    return authenticate


def require_agent(agent_id: int) -> None:
    """Checks that the caller of this call may act as an agent; without a door everybody may.

    Raises:
        NotPermittedError: it may not.
    """
    caller = _CALLER.get()
    if caller is not None:
        caller.require_agent(agent_id)


def require_role(role: str) -> None:
    """Checks that the caller of this call has a role; without a door everybody has.

    Raises:
        NotPermittedError: it has another.
    """
    caller = _CALLER.get()
    if caller is not None:
        caller.require_role(role)


def require_policies(agent_ids: Iterable[int]) -> None:
    """Checks that the caller of this call may read the policies of these agents, of none meaning all.

    Raises:
        NotPermittedError: it is an actor of another agent.
    """
    caller = _CALLER.get()
    if caller is None or caller.identity.role is not Role.ACTOR or caller.identity.agent_id is None:
        return
    wanted = set(agent_ids)
    if wanted != {caller.identity.agent_id}:
        caller.refuse(
            Denial.AGENT, f"an actor of agent {caller.identity.agent_id} may read that agent's policies alone"
        )


def agent_to_join(wanted: int | None) -> int | None:
    """The agent id that the caller joins as: what it wants, else what its credentials are for.

    Raises:
        NotPermittedError: it wants another one.
    """
    caller = _CALLER.get()
    if caller is None:
        return wanted
    if wanted is None:
        return caller.identity.agent_id
    caller.require_agent(wanted)
    return wanted


@dataclass
class _Peer:
    open_calls: int
    last_call_at: float


class Handshakes:
    """Counts the connections that never brought a call. Lives on one event loop, but for `begun`.

    Which connection failed cannot be told, only how many did: those that began without those that brought
    a call, each of which is known by its client's address.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, *, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._pending: deque[float] = deque(maxlen=MAX_PENDING)
        self._peers: dict[str, _Peer] = {}

    def begun(self) -> None:
        """Notes that a connection begins; from any thread."""
        self._pending.append(self._clock())

    @contextmanager
    def call(self, peer: str) -> Iterator[None]:
        """Notes a call for as long as it is open."""
        known = self._peers.get(peer)
        if known is None:
            known = self._peers[peer] = _Peer(0, self._clock())
            if self._pending:
                self._pending.popleft()
        known.open_calls += 1
        try:
            yield
        finally:
            known.open_calls -= 1
            known.last_call_at = self._clock()

    def failed(self) -> int:
        """How many have turned out to have failed since this was called last."""
        now, count = self._clock(), 0
        while self._pending and now - self._pending[0] > FAILED_AFTER_S:
            self._pending.popleft()
            count += 1
        gone = [
            peer
            for peer, known in self._peers.items()
            if not known.open_calls and now - known.last_call_at > FORGOTTEN_AFTER_S
        ]
        for peer in gone:
            del self._peers[peer]
        return count


class Door:
    """Lets calls in, or refuses, counts and logs them. Lives on one event loop.

    Args:
        authenticate: says who calls.
        clock: monotonic seconds.
        handshakes: is told of every call, the refused included.

    Attributes:
        denied: how often callers were refused, by reason.
    """

    def __init__(
        self, authenticate: Authenticator, *, clock: Callable[[], float], handshakes: Handshakes
    ) -> None:
        self.denied: Counter[str] = Counter()
        self._handshakes = handshakes
        self._authenticate = authenticate
        self._clock = clock
        self._said: dict[str, tuple[float, int]] = {}

    @contextmanager
    def call(self, method: str, context: Context) -> Iterator[None]:
        """Lets a call in for as long as the block runs; in it, `require_agent` knows the caller.

        Raises:
            UnauthenticatedError: the caller has not shown who it is.
            NotPermittedError: its role may not call the method.
            OverloadedError: it makes more calls than are taken.
        """
        with self._handshakes.call(context.peer()):
            _CALLER.set(self._admitted(method, context))
            yield

    def _admitted(self, method: str, context: Context) -> "_Caller":
        peer = context.peer()
        try:
            identity = self._authenticate(method, context)
        except BadToken as error:
            self.deny(Denial(error.reason), f"{error}", peer)
            raise UnauthenticatedError(str(error)) from None
        except OverloadedError as error:
            self.deny(Denial.TOO_MANY_TOKENS, f"{error}", peer)
            raise
        caller = _Caller(identity, peer, self)
        if identity.role not in PERMISSIONS.get(method, ()):
            caller.refuse(
                Denial.ROLE,
                f"this node's credentials are those of a node of role {identity.role}, which may not call "
                f"{method.rpartition('/')[2]}; give it those of its own role",
            )
        return caller

    def deny(self, reason: Denial, sentence: str, peer: str, *, count: int = 1) -> None:
        """Counts refused callers and says so, unless that was said for another one just now."""
        self.denied[reason] += count
        now = self._clock()
        said_at, before = self._said.get(reason, (None, 0))
        if said_at is not None and now - said_at < SAY_EVERY_S:
            return
        since = self.denied[reason] - before
        more = f" ({since} times since this was last said)" if said_at is not None and since > 1 else ""
        log.warning("denied (%s): %s: %s%s", reason, shown(peer), sentence, more)
        self._said[reason] = (now, self.denied[reason])


@dataclass(frozen=True)
class _Caller:
    """Who makes the call that is being answered."""

    identity: Identity
    peer: str
    door: Door

    def require_agent(self, agent_id: int) -> None:
        if not self.identity.may_act_as(agent_id):
            self.refuse(
                Denial.AGENT,
                f"this node's credentials are for agent {self.identity.agent_id} alone, not "
                f"for agent {agent_id}; give it those of agent {agent_id}, or its own agent id with --agent",
            )

    def require_role(self, role: str) -> None:
        if self.identity.role != role:
            self.refuse(
                Denial.ROLE,
                f"this node's credentials are those of a node of role {self.identity.role}, not {role}",
            )

    def refuse(self, reason: Denial, sentence: str) -> None:
        self.door.deny(reason, sentence, f"{self.identity} at {self.peer}")
        raise NotPermittedError(sentence)


_CALLER: ContextVar[_Caller | None] = ContextVar("caller", default=None)
