"""The protection of a node's Prometheus endpoint."""

from pathlib import Path

from dase_grpc.metrics.endpoint import Contexts
from dase_grpc.replay.security.folders import server_contexts
from dase_grpc.replay.wire.addresses import Address, require_private


def protection(host: str, port: int, *, tls: Path | None, insecure: bool) -> Contexts | None:
    """What an endpoint encrypts with; None where it is plain, or where `port` is 0 (off).

    Raises:
        AddressError: it would be plain for other machines, and nobody has asked for that.
        CredentialsError: the TLS files cannot be used.
    """
    if port == 0:
        return None
    if tls is not None:
        return server_contexts(tls)
    require_private(Address(host, port), insecure=insecure, flag="--metrics-tls")
    return None
