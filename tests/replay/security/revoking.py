"""An authority that withdraws certificates, a service that reads its list, and what a caller is told."""

from contextlib import asynccontextmanager
from datetime import UTC, datetime

from contracts.sentences import refuses
from replay.security.credentials import guarded
from replay.wire.services import promptly

from dase_grpc.errors import UnauthenticatedError
from dase_grpc.replay.security.certificates import revoke
from dase_grpc.replay.security.identity import Identity


def withdraw(ring, identity=None, *files, authority="ca", **changes):
    """Signs the authority's list anew, with an identity's certificates on it."""
    held = None if identity is None else Identity.parse(identity)
    return revoke(ring.root / authority, held, files, **{"now": datetime.now(UTC), **changes})


@asynccontextmanager
async def listed(ring, **changes):
    """A service that reads the authority's list."""
    async with guarded(ring.folder("replay"), crl=ring.authority / "ca.crl", **changes) as guard:
        yield guard


async def refused(call, guard, count):
    """Whether a call is refused because its certificate is withdrawn, and counted."""
    with refuses(UnauthenticatedError, "is withdrawn", "dase certs issue"):
        await promptly(call)
    assert guard.door.denied == {"revoked": count}
