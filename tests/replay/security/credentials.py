"""Certificates and tokens made once for all tests, and services that ask for them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from replay.wire.services import SCHEMA, Clock, listening

from dase_grpc.replay.buffer.run import SharedRun
from dase_grpc.replay.client.cluster import ClusterClient, open_channel
from dase_grpc.replay.security.certificates import issue, make_authority
from dase_grpc.replay.security.dialler import Credentials
from dase_grpc.replay.security.door import Door
from dase_grpc.replay.security.identity import Identity
from dase_grpc.replay.security.tokens import make_token
from dase_grpc.replay.service.cluster import ClusterServicer
from dase_grpc.replay.service.policies import PolicyServicer
from dase_grpc.replay.service.server import ReplayServicer, add_standard, make_server
from dase_grpc.replay.wire.addresses import Address
from dase_grpc.replay.wire.messages import Membership

MEMBER = Membership("the-run", 3, 1, ttl_s=10, capacity=0, min_size=0)
HOSTS = ("127.0.0.1", "localhost")


@dataclass(frozen=True)
class Keyring:
    """An authority, another one that nobody here trusts, and what they have issued."""

    root: Path

    @property
    def authority(self) -> Path:
        return self.root / "ca"

    def folder(self, identity: str, *, authority: str = "ca", days_ago: int = 0, **changes: Any) -> Path:
        """A node's folder; one that was issued `days_ago` for 30 days."""
        directory = self.root / (authority if not days_ago else f"{authority}-{days_ago}-days-old")
        if not (directory / "ca.crt").exists():
            directory.mkdir(exist_ok=True)
            for name in ("ca.crt", "ca.key"):
                (directory / name).write_bytes((self.root / authority / name).read_bytes())
        known = directory / identity.replace("/", "-")
        if known.exists() and not changes:
            return known
        hosts = HOSTS if identity.startswith("replay") else ()
        now = datetime.now(UTC) - timedelta(days=days_ago)
        return issue(directory, Identity.parse(identity), hosts, now=now, **changes)

    def token(self, identity: str) -> Path:
        """A token file in `tokens`, the folder that services read."""
        file = self.root / "tokens" / f"{identity.replace('/', '-')}.token"
        return file if file.exists() else make_token(file.parent, Identity.parse(identity))

    def with_certificate(self, identity: str, **changes: Any) -> Credentials:
        return Credentials(self.folder(identity, **changes))

    def with_token(self, identity: str) -> Credentials:
        return Credentials(self.folder("replay"), self.token(identity))


def make_keyring(root: Path) -> Keyring:
    now = datetime.now(UTC)
    for authority in ("ca", "other"):
        make_authority(root / authority, now=now)
    keyring = Keyring(root)
    keyring.token("learner/0")
    return keyring


@dataclass
class Guarded:
    """A service that lets in only whom it should."""

    run: SharedRun
    address: Address
    door: Door
    clock: Clock
    wall: Clock

    @asynccontextmanager
    async def as_caller(self, credentials: Credentials | None) -> AsyncIterator["Caller"]:
        async with open_channel(self.address, credentials) as channel:
            yield Caller(channel, str(self.address))


@asynccontextmanager
async def let_in(
    keyring: Keyring, identity: str, *, by_token: bool = False, now: float | None = None
) -> AsyncIterator[tuple[Guarded, "Caller"]]:
    """A guarded service, and a caller with the identity's own certificate, or its token."""
    tokens = keyring.root / "tokens" if by_token else None
    credentials = keyring.with_token(identity) if by_token else keyring.with_certificate(identity)
    replay = keyring.folder("replay")
    async with guarded(replay, tokens, now=now) as guard, guard.as_caller(credentials) as caller:
        yield guard, caller


@dataclass
class Caller:
    """A client with credentials."""

    channel: Any
    address: str

    @property
    def cluster(self) -> ClusterClient:
        return ClusterClient(self.channel, self.address)

    async def join(self, agent_id: int | None = 0) -> Membership:
        return await self.cluster.join(node_name="node", schema=SCHEMA, agent_id=agent_id)


@asynccontextmanager
async def guarded(
    tls: Path, tokens: Path | None = None, *, crl: Path | None = None, now: float | None = None
) -> AsyncIterator[Guarded]:
    """A replay service with TLS on a free port; its wall clock stands still at `now` (Unix seconds)."""
    clock, wall = Clock(1_000.0), Clock(datetime.now(UTC).timestamp() if now is None else now)
    door = Door(tls, tokens, crl=crl, clock=clock, wall_clock=wall)
    run = SharedRun("the-run", capacity=1_000, min_size=1, seed=7, ttl_s=10.0)
    replay, policies = ReplayServicer(run), PolicyServicer(run)
    cluster = ClusterServicer(run, clock=clock, on_event=lambda event: None)
    server, secrets = make_server(door=door), door.credentials()
    add_standard(server, ())
    async with listening(replay, cluster, policies, server=server, credentials=secrets) as (_, address):
        yield Guarded(run, address, door, clock, wall)
        replay.streams.drain()
        policies.streams.drain()
