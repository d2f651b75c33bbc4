"""Revocation: certificates that their authority has withdrawn, and calls that end because of it."""

import asyncio
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Final

from dase_grpc.errors import CredentialsError
from dase_grpc.replay.security.folders import CA, CRL, Live, is_there, read_public, stamp_of
from dase_grpc.replay.security.tokens import BadToken
from dase_grpc.replay.wire.status import Context

try:
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm
except ModuleNotFoundError as error:
    raise CredentialsError(
        "--crl needs the cryptography library; install it with pip install 'dase-grpc[certs]'"
    ) from error

REVOKED: Final = "revoked"
UNREADABLE: Final = (
    ValueError,
    UnsupportedAlgorithm,
    x509.DuplicateExtension,
    x509.InvalidVersion,
    x509.UnsupportedGeneralNameType,
)
"""What the library raises of a file that it cannot read, be it when a part of it is first looked at."""

_BEGIN: Final = b"-----BEGIN X509 CRL-----"
_LIST: Final = re.compile(_BEGIN + rb"[^-]+-----END X509 CRL-----")

Certificate = tuple[x509.Name, int]
"""What names one certificate: its issuer, however that is encoded, and its serial number."""

log = logging.getLogger("dase")


@dataclass(frozen=True)
class Edition:
    """Which of its authority's lists one is: its number, None of a list without, and when it was signed."""

    number: int | None
    signed: datetime

    def __str__(self) -> str:
        number = "" if self.number is None else f"number {self.number} "
        return f"{number}of {self.signed:%Y-%m-%d %H:%M} UTC"

    def precedes(self, other: "Edition") -> bool:
        """Whether it is older; by the numbers where both have one, for an authority's clock may be ahead."""
        if self.number is None or other.number is None or self.number == other.number:
            return self.signed < other.signed
        return self.number < other.number


@dataclass(frozen=True)
class RevocationLists:
    """What a file of revocation lists says: who is withdrawn, and until when the first list counts.

    `editions` says of each authority which its latest list is; `without` are the names of those authorities
    whose certificates all count, for they have no list.
    """

    revoked: frozenset[Certificate]
    until: datetime
    editions: Mapping[x509.Name, Edition]
    without: frozenset[str]


@lru_cache(maxsize=4_096)
def certificate_of(pem: bytes) -> Certificate:
    """The certificate in a PEM text; one of UNREADABLE where that is none."""
    found = x509.load_pem_x509_certificate(pem)
    return found.issuer, found.serial_number


def read_lists(file: Path, authority: Path, *, now: datetime) -> RevocationLists:
    """The revocation lists in a PEM file, several where one authority follows another.

    Raises:
        CredentialsError: there is none, or one is damaged, expired, or not signed by an authority whose
            certificate is in the file `authority`.
    """
    content = read_public(file)
    blocks = _LIST.findall(content)
    if not blocks:
        raise CredentialsError(
            f"{file} holds no revocation list in PEM form; copy the one that `dase certs revoke` makes there"
        )
    if len(blocks) != content.count(_BEGIN):  # one without its end would let in again who is on it
        raise _damaged(file)
    try:
        authorities = x509.load_pem_x509_certificates(read_public(authority))
        subjects = {each.subject for each in authorities}
    except UNREADABLE as error:
        raise CredentialsError(f"{authority} holds no certificate in PEM form") from error
    lists = [_checked(file, block, authorities, now) for block in blocks]
    revoked = {(each.issuer, one.serial_number) for each in lists for one in each}
    without = subjects - {each.issuer for each in lists}
    names = frozenset(name.rfc4514_string() for name in without)
    return RevocationLists(frozenset(revoked), min(_end(each) for each in lists), _editions(lists), names)


def _editions(lists: Iterable[x509.CertificateRevocationList]) -> dict[x509.Name, Edition]:
    """The latest list of each authority."""
    latest: dict[x509.Name, Edition] = {}
    for each in lists:
        edition = Edition(number_of(each), each.last_update_utc)
        if not edition.precedes(latest.get(each.issuer, edition)):
            latest[each.issuer] = edition
    return latest


def number_of(found: x509.CertificateRevocationList) -> int | None:
    """The list's number; None of one that another tool has signed without a number."""
    try:
        return found.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number
    except x509.ExtensionNotFound:
        return None


def _checked(
    file: Path, block: bytes, authorities: Sequence[x509.Certificate], now: datetime
) -> x509.CertificateRevocationList:
    try:
        found = x509.load_pem_x509_crl(block)
        critical = any(extension.critical for extension in found.extensions)
    except UNREADABLE as error:
        raise _damaged(file) from error
    if not any(_is_signed_by(found, each) for each in authorities):
        raise CredentialsError(
            f"the revocation list in {file} is not signed by an authority whose certificate is in {CA}; copy "
            f"the one that `dase certs revoke` has made there"
        )
    if critical:
        raise CredentialsError(f"the revocation list in {file} is a part of one; put the whole list there")
    if _end(found) < now:
        raise CredentialsError(
            f"the revocation list in {file} has expired, on {_end(found):%Y-%m-%d %H:%M} UTC; sign it again "
            f"with `dase certs revoke`, and copy it there"
        )
    return found


def _damaged(file: Path) -> CredentialsError:
    return CredentialsError(f"the revocation list in {file} is damaged; copy it there again")


def own_list(directory: Path, authority: x509.Certificate) -> x509.CertificateRevocationList | None:
    """The list in an authority's folder, if it has one; whoever lost it would let in again who is on it."""
    file = directory / CRL
    if not is_there(file):
        return None
    try:
        found = x509.load_pem_x509_crl(file.read_bytes())
        number_of(found)  # the extensions are parsed when they are asked for
    except (OSError, *UNREADABLE) as error:
        raise CredentialsError(
            f"{file} is damaged; copy it back from where it is in use, or where there is no copy, "
            f"delete it and withdraw again whoever was on it"
        ) from error
    if not _is_signed_by(found, authority):
        raise CredentialsError(f"{file} is not signed by {directory / CA}; move it away, or back")
    return found


def _is_signed_by(found: x509.CertificateRevocationList, authority: x509.Certificate) -> bool:
    """Whether a list is an authority's own."""
    try:
        return found.issuer == authority.subject and found.is_signature_valid(authority.public_key())  # type: ignore[arg-type]
    except (TypeError, *UNREADABLE):  # a key of a kind that signs no lists
        return False


def _end(found: x509.CertificateRevocationList) -> datetime:
    """When a list ends; one that does not say has ended long ago."""
    return found.next_update_utc or datetime.fromtimestamp(0, UTC)


@dataclass(eq=False)
class _OpenCall:
    """A call that is being answered, by a task."""

    certificate: Certificate
    task: "asyncio.Task[object]"
    refusal: BadToken | None = None
    cancelled: int = 0

    def end(self) -> None:
        """Cancels it, once more where it has not ended yet."""
        self.refusal = _refusal(self.certificate)
        self.cancelled += 1
        self.task.cancel()

    def taken_back(self) -> BadToken | None:
        """Why it was cancelled, if by `end` alone: gRPC tells a caller nothing of one that ends cancelled."""
        for _ in range(self.cancelled):
            self.task.uncancel()
        return None if self.task.cancelling() else self.refusal


class Revocation:
    """Refuses callers whose certificates are withdrawn, and ends the calls that they have open.

    Lives on one event loop. The file is read at once, and again when it or the authority's changes; a list
    that is not fit, or older, then leaves the one before in use, which is logged.

    Args:
        file: one or more revocation lists; `authority` has the certificates of those who may sign them.
        clock: Unix seconds.
    """

    def __init__(self, file: Path, authority: Path, *, clock: Callable[[], float]) -> None:
        self._clock, self._file, self._authority = clock, file, authority
        self._editions: Mapping[x509.Name, Edition] = {}
        self._lists = Live(f"revocation lists of {file}", lambda: stamp_of(file, authority), self._read)
        self._open: set[_OpenCall] = set()
        self._said_ended: datetime | None = None

    @property
    def until(self) -> datetime:
        """When the first of the lists in use ends."""
        return self._lists.value.until

    @property
    def unfit(self) -> bool:
        """Whether the lists that lie there cannot be used, or those in use have ended."""
        return self._lists.unfit or self.until < self._now()

    @contextmanager
    def call(self, context: Context) -> Iterator[None]:
        """Lets a call in for as long as the block runs, in the call's own task.

        Raises:
            BadToken: the caller's certificate is withdrawn, be it while the block waits.
        """
        call = _OpenCall(_shown(context), _this_task())
        if call.certificate in self._lists.value.revoked:
            raise _refusal(call.certificate)
        self._open.add(call)
        try:
            yield
        except asyncio.CancelledError:
            if (refusal := call.taken_back()) is None:
                raise
            raise refusal from None
        finally:
            self._open.discard(call)

    def look(self) -> None:
        """Takes a list that has changed into use, and ends the open calls of whoever is on it."""
        self._lists.refresh()
        for call in self._open:
            if call.certificate in self._lists.value.revoked:  # again, where it went on all the same
                call.end()
        if self.until < self._now() and self.until != self._said_ended:
            self._said_ended = self.until
            log.warning("%s has expired and is still in use; sign it again, and copy it there", self._file)

    def _read(self) -> RevocationLists:
        """The lists that lie there now; one that is older than that in use would let nodes in again."""
        lists = read_lists(self._file, self._authority, now=self._now())
        for authority, edition in lists.editions.items():
            used = self._editions.get(authority, edition)
            if edition.precedes(used):
                raise CredentialsError(
                    f"the revocation list in {self._file} was signed before the one in use ({edition}, not "
                    f"{used}); copy the latest there"
                )
        for name in sorted(lists.without):
            log.warning(
                "%s has no list of %s, which is in %s: all its certificates count", self._file, name, CA
            )
        self._editions = lists.editions
        return lists

    def _now(self) -> datetime:
        return datetime.fromtimestamp(self._clock(), UTC)


def _refusal(certificate: Certificate) -> BadToken:
    return BadToken(
        REVOKED,
        f"the certificate of this node (serial number {certificate[1]:x}) is withdrawn; if the node is to go "
        f"on, give it a new one with `dase certs issue --replace`",
    )


def _shown(context: Context) -> Certificate:
    """The certificate that the caller has shown in its handshake."""
    (pem,) = context.auth_context().get("x509_pem_cert") or (b"",)
    try:
        return certificate_of(pem)
    except UNREADABLE:
        raise BadToken(
            REVOKED, "the certificate of this node cannot be read, so nobody knows whether it is withdrawn"
        ) from None


def _this_task() -> "asyncio.Task[object]":
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("a call is answered in a task")
    return task
