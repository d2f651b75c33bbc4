"""The door of a service: its certificate, who calls, what a caller of each role may do, who came in vain."""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Final

import grpc

from dase_grpc.errors import CredentialsError, NotPermittedError, OverloadedError, UnauthenticatedError
from dase_grpc.metrics.calls import DoorState
from dase_grpc.progress import several
from dase_grpc.replay.security.folders import CA, Live, TlsFiles, TlsFolder, live_files
from dase_grpc.replay.security.identity import PREFIX, Identity, Role
from dase_grpc.replay.security.selfcheck import require_accepted
from dase_grpc.replay.security.tokens import TOKEN_KEY, BadToken, Secret, TokenBook, live_secrets
from dase_grpc.replay.wire.messages import shown
from dase_grpc.replay.wire.status import Context

if TYPE_CHECKING:
    from dase_grpc.replay.security.revocation import Revocation

EVERYBODY: Final = frozenset(Role)
CLIENTS: Final = frozenset({Role.CLIENT})
NODES: Final = EVERYBODY - CLIENTS
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
    "/dase.v1.ClusterService/Status": NODES,
    "/dase.v1.PolicyService/Publish": LEARNERS,
    "/dase.v1.PolicyService/Subscribe": READERS,
    "/dase.inference.v1.InferenceService/Act": CLIENTS,
    "/dase.inference.v1.InferenceService/ActStream": CLIENTS,
    "/dase.inference.v1.InferenceService/DescribePolicy": CLIENTS | {Role.OBSERVER},
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
    REVOKED = "revoked"


def require_agent(agent_id: int) -> None:
    """Checks that the caller of this call may act as an agent; without a door everybody may."""
    if (caller := _CALLER.get()) is not None:
        caller.require_agent(agent_id)


def require_role(role: str) -> None:
    """Checks that the caller of this call has a role; without a door everybody has."""
    if (caller := _CALLER.get()) is not None and caller.identity.role != role:
        caller.refuse(
            Denial.ROLE,
            f"this node's credentials are those of a node of role {caller.identity.role}, not {role}",
        )


def require_policies(agent_ids: Iterable[int]) -> None:
    """Checks that the caller may read the policies of these agents, of none meaning all."""
    caller = _CALLER.get()
    if caller is None or caller.identity.role is not Role.ACTOR or caller.identity.agent_id is None:
        return
    if set(agent_ids) != {caller.identity.agent_id}:
        caller.refuse(
            Denial.AGENT, f"an actor of agent {caller.identity.agent_id} may read that agent's policies alone"
        )


def agent_to_join(wanted: int | None) -> int | None:
    """The agent id that the caller joins as: the one it wants and may have, else its credentials' own."""
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
        self._peers = {
            peer: known
            for peer, known in self._peers.items()
            if known.open_calls or now - known.last_call_at <= FORGOTTEN_AFTER_S
        }
        return count


class Door:
    """Lets calls in, or refuses, counts and logs them. Lives on one event loop, but for what gRPC asks for.

    Callers show certificates or, where the service has tokens, tokens alone. Files are read at once, and
    again when they change: those of TLS at each new connection, tokens and revocation lists when `look` is
    called, which ends the open calls of whoever is on a new list.

    Args:
        tokens: a file or folder of tokens (replay/security/tokens.py); clients then show no certificates.
        crl: a file of revocation lists (replay/security/revocation.py); without it all certificates count.
        wall_clock: Unix seconds, which tokens are compared with; `clock` is monotonic.

    Attributes:
        denied: how often callers were refused, by reason.
    """

    def __init__(
        self,
        tls: Path,
        tokens: Path | None = None,
        *,
        crl: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.denied: Counter[str] = Counter()
        self._files = live_files(TlsFolder(tls))
        require_accepted(self._files.value, where=tls, as_server=True)
        self._secrets: Live[list[Secret]] | None = None if tokens is None else live_secrets(tokens)
        self._book = TokenBook(self._secrets.value if self._secrets else [], clock=wall_clock)
        self._revocation = None if crl is None else _revocation(crl, tls, wall_clock)
        self._handshakes = Handshakes(clock=clock)
        self._clock = clock
        self._said: dict[str, tuple[float, int]] = {}

    def credentials(self) -> grpc.ServerCredentials:
        """What a port is bound with."""
        return grpc.dynamic_ssl_server_credentials(
            self._configuration(self._files.value),
            self._renewed,  # type: ignore[arg-type]  # the stubs do not know that None means: as before
            require_client_authentication=self._secrets is None,
        )

    @property
    def state(self) -> DoorState:
        """What metrics show; for any thread."""
        denied, lists = dict(self.denied), self._revocation
        if lists is None:
            return DoorState(denied)
        return DoorState(denied, lists_until=lists.until.timestamp(), lists_unfit=lists.unfit)

    def look(self) -> None:
        """Takes tokens and lists that have changed into use, and counts connections that came to nothing."""
        if self._revocation is not None:
            self._revocation.look()
        if self._secrets is not None and self._secrets.refresh():
            self._book.replace(self._secrets.value)
        if count := self._handshakes.failed():
            self.deny(
                Denial.HANDSHAKE,
                f"of {several(count, 'connection')} no call came: no TLS, no certificate, one of another "
                f"authority, or an expired one (start with GRPC_VERBOSITY=INFO to see which)",
                "unknown callers",
                count=count,
            )

    @contextmanager
    def call(self, method: str, context: Context) -> Iterator[None]:
        """Lets a call in for as long as the block runs; in it, `require_agent` knows the caller."""
        with self._handshakes.call(context.peer()), self._unless_revoked(context):
            _CALLER.set(self._admitted(method, context))
            yield

    @contextmanager
    def _unless_revoked(self, context: Context) -> Iterator[None]:
        """The block of a call, which does not begin, or ends, where its caller's certificate is withdrawn."""
        try:
            with nullcontext() if self._revocation is None else self._revocation.call(context):
                yield
        except BadToken as error:
            self.deny(Denial(error.reason), str(error), _stated(context))
            raise UnauthenticatedError(str(error)) from None

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

    def _admitted(self, method: str, context: Context) -> "_Caller":
        peer = context.peer()
        try:
            identity = self._by_token(method, context) if self._secrets else _by_certificate(context)
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

    def _by_token(self, method: str, context: Context) -> Identity:
        tokens = [value for key, value in context.invocation_metadata() or () if key == TOKEN_KEY]
        if len(tokens) != 1 or not isinstance(tokens[0], str):
            raise BadToken(
                Denial.NO_TOKEN,
                "this service takes calls with a token only; give one with --token-file",
            )
        return self._book.check(method, tokens[0])

    def _renewed(self) -> grpc.ServerCertificateConfiguration | None:
        """What gRPC asks for, on a thread of its own, at each connection; None means: as before."""
        self._handshakes.begun()
        return self._configuration(self._files.value) if self._files.refresh() else None

    def _configuration(self, files: TlsFiles) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration(
            [(files.key, files.certificate)],
            root_certificates=files.authority if self._secrets is None else None,
        )


def door_of(tls: Path | None, tokens: Path | None, crl: Path | None = None) -> Door | None:
    """The door that a service was told on its command line; None where it was told of no file."""
    if tls is None and tokens is not None:
        raise CredentialsError(
            "--tokens needs --tls, so that nobody on the way can read them or pass for the service"
        )
    if crl is not None and (tls is None or tokens is not None):
        raise CredentialsError(
            "--crl withdraws certificates, so it needs --tls, and no --tokens, which are withdrawn by taking "
            "them out of their file"
        )
    return None if tls is None else Door(tls, tokens, crl=crl)


def _revocation(crl: Path, tls: Path, clock: Callable[[], float]) -> "Revocation":
    from dase_grpc.replay.security.revocation import Revocation

    return Revocation(crl, tls / CA, clock=clock)


def _by_certificate(context: Context) -> Identity:
    """The caller as its certificate, which the handshake has checked, says."""
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


def _stated(context: Context) -> str:
    """Who a caller says that it is, for the log."""
    uris = context.auth_context().get("peer_uri", ())
    return f"{b', '.join(uris).decode(errors='replace')} at {context.peer()}"


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

    def refuse(self, reason: Denial, sentence: str) -> None:
        self.door.deny(reason, sentence, f"{self.identity} at {self.peer}")
        raise NotPermittedError(sentence)


_CALLER: ContextVar[_Caller | None] = ContextVar("caller", default=None)
