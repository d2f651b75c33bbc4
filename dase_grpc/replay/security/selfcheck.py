"""The self-check of a certificate: whether it will be accepted, and why it was not, as Python's TLS says."""

import asyncio
import ssl
from pathlib import Path
from typing import Final

from dase_grpc.errors import CredentialsError
from dase_grpc.replay.security.folders import CA, CERTIFICATE, KEY, TlsFiles

PROBE_S: Final = 3.0

_NO_TLS: Final = frozenset({"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"})
_NOT_TAKEN: Final = {
    True: "does not accept this node's certificate; both sides need certificates of one authority, not "
    "expired, see `dase certs show`",
    False: "wants a certificate of this node, not a token; give one with --tls, without --token-file",
}


def require_accepted(files: TlsFiles, *, where: Path, as_server: bool) -> None:
    """Checks a node's own certificate against the authority in the same folder; else a CredentialsError."""
    reason = _refusal(files, where, as_server=as_server)
    if reason is not None:
        raise CredentialsError(
            f"{where / CERTIFICATE} will not be accepted ({reason}); issue a new one of the authority whose "
            f"certificate is {CA} there, see `dase certs show`"
        )


async def why_not(
    host: str, port: int, *, tls: Path | None, has_certificate: bool, server_name: str = ""
) -> str | None:
    """Connects once and says why a service does not let this node in, if TLS is the reason.

    `tls` is the folder with the node's files; it shows a certificate of its own if `has_certificate`. That
    of the service must be of `server_name`, where that is not the host.
    """
    where = f"the service at {host}:{port}"
    try:
        context = _as_node(tls, has_certificate=has_certificate)
    except (OSError, ValueError):
        return None  # the files are being replaced
    try:
        taken = await _is_taken(host, port, context, server_name or host)
    except ssl.SSLError as error:
        return None if tls is None else f"{where} {_fault(error)}"
    if tls is None:
        return None if taken is None else f"{where} takes TLS only; give this node credentials with --tls DIR"
    return f"{where} {_NOT_TAKEN[has_certificate]}" if taken is False else None


def _fault(error: ssl.SSLError) -> str:
    """What is wrong with a service that this node shakes hands with in vain."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            f"shows a certificate that is not trusted here ({error.verify_message.rstrip('.')}); use the "
            f"ca.crt of its authority, and a host name that its certificate has"
        )
    if error.reason in _NO_TLS:
        return "does not speak TLS; start it with --tls, or this node without"
    return f"ends the TLS handshake ({error.reason}); compare both sides' --tls folders"


async def _is_taken(host: str, port: int, context: ssl.SSLContext, server_name: str) -> bool | None:
    """Whether a service goes on after the handshake; None if it does not get that far.

    Raises:
        ssl.SSLError: what this side, or the other, has against the handshake.
    """
    writer: asyncio.StreamWriter | None = None
    shaken = False
    try:
        async with asyncio.timeout(PROBE_S):
            reader, writer = await asyncio.open_connection(
                host, port, ssl=context, server_hostname=server_name
            )
            shaken = True
            return bool(await reader.read(1))
    except ssl.SSLError:
        raise
    except OSError as error:  # a TimeoutError is one
        return False if shaken and isinstance(error, ConnectionError) else None
    finally:
        if writer is not None:
            writer.transport.abort()


def _as_node(tls: Path | None, *, has_certificate: bool) -> ssl.SSLContext:
    context = _context(verify=tls is not None)
    if tls is not None:
        context.load_verify_locations(tls / CA)
        if has_certificate:
            context.load_cert_chain(tls / CERTIFICATE, tls / KEY, password=b"")
    return context


def _refusal(files: TlsFiles, where: Path, *, as_server: bool) -> str | None:
    """Why the other side would refuse this certificate, found out by a handshake with oneself in memory."""
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), _context(verify=as_server)
    checks = client if as_server else server
    checks.check_hostname = False
    checks.verify_mode = ssl.CERT_REQUIRED
    checks.load_verify_locations(cadata=files.authority.decode("ascii"))
    try:
        for context in (server, client):
            context.load_cert_chain(where / CERTIFICATE, where / KEY, password=b"")
        _shake(client, server)
    except ssl.SSLCertVerificationError as error:
        return error.verify_message.rstrip(".")
    except (OSError, ValueError) as error:
        return getattr(error, "reason", None) or str(error)
    return None


def _shake(client_context: ssl.SSLContext, server_context: ssl.SSLContext) -> None:
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(down, up)
    server = server_context.wrap_bio(up, down, server_side=True)
    waiting = [client, server]
    while waiting:
        for side in list(waiting):
            try:
                side.do_handshake()
                waiting.remove(side)
            except ssl.SSLWantReadError:
                continue


def _context(*, verify: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
