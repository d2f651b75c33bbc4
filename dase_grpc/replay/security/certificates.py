"""A development certificate authority, and the certificates that it issues to nodes."""

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Final

from dase_grpc.errors import CredentialsError
from dase_grpc.replay.security.folders import CA, CRL, alone_in, is_there, put, refuse_existing, writing_into
from dase_grpc.replay.security.identity import PREFIX, Identity, Role
from dase_grpc.replay.wire.addresses import is_host_name

try:
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    from dase_grpc.replay.security.revocation import UNREADABLE, Certificate, number_of, own_list, read_lists
except ModuleNotFoundError as error:
    raise CredentialsError(
        "`dase certs` needs the cryptography library; install it with pip install 'dase-grpc[certs]'"
    ) from error

AUTHORITY_KEY: Final = "ca.key"
CA_DAYS: Final = 365
NODE_DAYS: Final = 30
LIST_DAYS: Final = 365
ISSUED: Final = "issued.txt"
"""The authority's record: a line for each certificate, with its serial number, its identity and its end."""

BACKDATED: Final = timedelta(minutes=5)
"""How long before now a certificate is valid, for machines whose clocks are behind."""


@dataclass(frozen=True)
class Shown:
    """What a certificate says: its file, whose it is, for which hosts, and until when."""

    file: Path
    holder: str
    hosts: Sequence[str]
    not_before: datetime
    not_after: datetime
    revoked: bool = False

    def line(self, now: datetime) -> str:
        """All of it, for people."""
        left = self.not_after - now
        until = f"valid until {self.not_after:%Y-%m-%d %H:%M} UTC"
        if left < timedelta(0):
            until = f"EXPIRED on {self.not_after:%Y-%m-%d %H:%M} UTC"
        elif self.revoked:
            until = f"REVOKED, otherwise {until}"
        elif now < self.not_before:
            until = f"NOT YET VALID, from {self.not_before:%Y-%m-%d %H:%M} UTC"
        hosts = f", hosts {', '.join(self.hosts)}" if self.hosts else ""
        return f"{self.file}: {self.holder}{hosts}, {until}"


def make_authority(directory: Path, *, now: datetime, days: int = CA_DAYS) -> Path:
    """Makes a certificate authority in a folder: `ca.crt` for everybody and `ca.key` for nobody else."""
    refuse_existing(directory / CA, directory / AUTHORITY_KEY)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"DASE development CA {secrets.token_hex(4)}")])
    certificate = (
        _builder(name, name, key, now, days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    with writing_into(directory):
        directory.mkdir(parents=True, exist_ok=True)
        put(directory / AUTHORITY_KEY, _key_pem(key), private=True)
        put(directory / CA, _pem(certificate))
    return directory / CA


def issue(
    directory: Path,
    identity: Identity,
    hosts: Sequence[str],
    *,
    now: datetime,
    days: int = NODE_DAYS,
    replace: bool = False,
) -> Path:
    """Makes a node's folder with ca.crt, tls.crt and tls.key; returns it.

    One that is there is refused without `replace`. Only a replay's certificate may be a server's, so that no
    other node can pass for one.
    """
    authority, authority_key = _authority(directory)
    folder = directory / str(identity).replace("/", "-")
    if not replace:
        refuse_existing(folder / "tls.crt", folder / "tls.key", remedy="renew it with --replace")
    if identity.role is Role.REPLAY and not hosts:
        raise CredentialsError(
            "a replay's certificate names the hosts it is reached by; give each with --host"
        )
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = _node_certificate(key, identity, hosts, issuer=authority, now=now, days=days)
    signed = certificate.sign(authority_key, hashes.SHA256())
    with writing_into(folder):
        folder.mkdir(parents=True, exist_ok=True)
        _record(directory, identity, signed)  # first, so that none is out that cannot be withdrawn
        put(folder / CA, _pem(authority))
        put(folder / "tls.key", _key_pem(key), private=True)
        put(folder / "tls.crt", _pem(signed))
    return folder


@dataclass(frozen=True)
class Withdrawn:
    """A revocation list: its file, the serial numbers that are new on it, of how many, and its end."""

    file: Path
    added: Sequence[int]
    count: int
    until: datetime

    def line(self) -> str:
        """All of it, for people."""
        new = ", ".join(f"{serial:x}" for serial in self.added) or "nothing"
        return (
            f"{self.file}: withdrawn {new}; {self.count} in all, valid until {self.until:%Y-%m-%d %H:%M} UTC"
        )


def revoke(
    directory: Path,
    identity: Identity | None = None,
    files: Sequence[Path] = (),
    *,
    now: datetime,
    days: int = LIST_DAYS,
) -> Withdrawn:
    """Signs the authority's revocation list anew, `ca.crl`, with more certificates on it than before.

    Those are all that were issued to an identity, and are still valid, and those in files. With neither, the
    list is only made, or made valid for longer. Of several that do so at once each waits for the one before.
    A CredentialsError where there is nothing to withdraw.
    """
    authority, key = _authority(directory)
    serials = {_own_serial(file, authority) for file in files}
    if identity is not None:
        serials |= _issued_to(directory, identity, authority, now)
    until = _days_after(now, days)
    with alone_in(directory):
        before = own_list(directory, authority)
        known = {each.serial_number for each in before or ()}
        added = sorted(serials - known)
        made = _next_list(authority, before, added, now=now, until=until).sign(key, hashes.SHA256())
        with writing_into(directory):
            put(directory / CRL, made.public_bytes(serialization.Encoding.PEM))
    return Withdrawn(directory / CRL, added, len(serials | known), until)


def _next_list(
    authority: x509.Certificate,
    before: x509.CertificateRevocationList | None,
    added: Sequence[int],
    *,
    now: datetime,
    until: datetime,
) -> x509.CertificateRevocationListBuilder:
    """The list that follows the one before, with more serial numbers on it.

    It is later and has a higher number, even where the clock was ahead at the one before, or where that is
    lost or an old copy.
    """
    update, number = now - BACKDATED, int(now.timestamp())
    if before is not None:
        update = min(max(update, before.last_update_utc), until)
        number = max(number, (number_of(before) or 0) + 1)
    made = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(authority.subject)
        .last_update(update)
        .next_update(until)
        .add_extension(x509.CRLNumber(number), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()),  # type: ignore[arg-type]
            critical=False,
        )
    )
    for each in before or ():
        made = made.add_revoked_certificate(each)
    for serial in added:
        entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(now)
        made = made.add_revoked_certificate(entry.build())
    return made


def certificates_in(directory: Path) -> list[Shown]:
    """What the certificates in a folder and in those right below it say; there has to be one."""
    files = sorted({*directory.glob("*.crt"), *directory.glob("*/*.crt")}) if is_there(directory) else []
    if not files:
        raise CredentialsError(
            f"{directory} holds no certificate; make some with `dase certs init {directory}`"
        )
    revoked = _revoked_in(directory)
    return [shown for file in files for shown in _shown(file, revoked)]


def _node_certificate(
    key: ec.EllipticCurvePrivateKey,
    identity: Identity,
    hosts: Sequence[str],
    *,
    issuer: x509.Certificate,
    now: datetime,
    days: int,
) -> x509.CertificateBuilder:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, str(identity))])
    purposes = [ExtendedKeyUsageOID.CLIENT_AUTH]
    if identity.role is Role.REPLAY:
        purposes.append(ExtendedKeyUsageOID.SERVER_AUTH)
    names = [x509.UniformResourceIdentifier(identity.uri), *(_host(host) for host in hosts)]
    return (
        _builder(subject, issuer.subject, key, now, days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer.public_key()),  # type: ignore[arg-type]
            critical=False,
        )
    )


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, now: datetime, days: int
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(_days_after(now, days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _days_after(now: datetime, days: int) -> datetime:
    try:
        return now + timedelta(days=days)
    except OverflowError:
        raise CredentialsError(f"--days {days} ends after the year 9999; take fewer") from None


def _usage(*, signs: bool) -> x509.KeyUsage:
    others = "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"
    never = dict.fromkeys((*others, "encipher_only", "decipher_only"), False)
    return x509.KeyUsage(digital_signature=not signs, key_cert_sign=signs, crl_sign=signs, **never)


def _host(name: str) -> x509.GeneralName:
    with suppress(ValueError):
        return x509.IPAddress(ip_address(name))
    if is_host_name(name):
        return x509.DNSName(name)
    raise CredentialsError(
        f"--host {name!r} is neither a host name nor an IP address; give it without a port"
    )


def _authority(directory: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    try:
        certificate = x509.load_pem_x509_certificate((directory / CA).read_bytes())
        key = serialization.load_pem_private_key((directory / AUTHORITY_KEY).read_bytes(), password=None)
        certified = certificate.public_key()
    except (OSError, TypeError, *UNREADABLE) as error:
        raise CredentialsError(
            f"{directory} holds no usable certificate authority; make one with `dase certs init {directory}`"
        ) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certified:
        raise CredentialsError(f"{directory / AUTHORITY_KEY} is not the key of {directory / CA}")
    return certificate, key


def _record(directory: Path, identity: Identity, certificate: x509.Certificate) -> None:
    """Adds a certificate to the authority's record."""
    line = f"{certificate.serial_number:x} {identity} {certificate.not_valid_after_utc:%Y-%m-%dT%H:%M:%SZ}\n"
    with (directory / ISSUED).open("a", encoding="ascii") as record:  # one write, beside any other's
        record.write(line)


def _issued_to(directory: Path, identity: Identity, authority: x509.Certificate, now: datetime) -> set[int]:
    """The serial numbers of an identity's certificates; of those from before there was a record, the last."""
    latest = directory / str(identity).replace("/", "-") / "tls.crt"
    found = {_own_serial(latest, authority)} if is_there(latest) else set()
    valid = list(_still_valid(directory / ISSUED, now))
    found |= {serial for serial, holder in valid if holder == str(identity)}
    if not found:
        others = sorted({holder for _, holder in valid if holder.startswith(f"{identity.role}/")})
        what = f"{identity} to withdraw" + (f" (but of {', '.join(others)})" if others else "")
        raise CredentialsError(f"{directory} has no certificate of {what}; name its file with --certificate")
    return found


def _still_valid(record: Path, now: datetime) -> Iterator[tuple[int, str]]:
    """Serial number and identity of each certificate in the record that has not expired."""
    try:
        for line in record.read_text(encoding="ascii").splitlines() if record.exists() else ():
            serial, holder, end = line.split()
            if datetime.fromisoformat(end) > now:
                yield int(serial, 16), holder
    except (OSError, ValueError) as error:
        raise CredentialsError(
            f"{record} is damaged; name the certificates themselves with --certificate"
        ) from error


def _own_serial(file: Path, authority: x509.Certificate) -> int:
    certificate = _read(file)
    if certificate == authority:
        raise CredentialsError(
            f"{file} is the authority itself, which no list of its own withdraws; make another with "
            f"`dase certs init`, and issue all certificates anew"
        )
    try:
        certificate.verify_directly_issued_by(authority)
    except (TypeError, InvalidSignature, *UNREADABLE) as error:
        raise CredentialsError(
            f"{file} is not a certificate of this authority, which cannot withdraw it"
        ) from error
    return certificate.serial_number


def _revoked_in(directory: Path) -> frozenset[Certificate]:
    """Who is on the revocation list in a folder, expired or not; `revoke` takes an authority's own, too."""
    file = directory / CRL
    if not is_there(file):
        return frozenset()
    if is_there(directory / AUTHORITY_KEY):
        own_list(directory, _read(directory / CA))
    return read_lists(file, directory / CA, now=datetime.fromtimestamp(0, UTC)).revoked


def _read(file: Path) -> x509.Certificate:
    with _reading(file):
        return x509.load_pem_x509_certificate(file.read_bytes())


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, *UNREADABLE) as error:
        raise CredentialsError(f"{file} is no certificate that can be read") from error


def _shown(file: Path, revoked: frozenset[Certificate]) -> list[Shown]:
    with _reading(file):  # the parts of each are parsed when they are asked for
        found = x509.load_pem_x509_certificates(file.read_bytes())
        return [_contents(file, each, revoked) for each in found]


def _contents(file: Path, certificate: x509.Certificate, revoked: frozenset[Certificate]) -> Shown:
    try:
        names = list(certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
    except x509.ExtensionNotFound:
        names = []
    uris = [
        name.value.removeprefix(PREFIX) for name in names if isinstance(name, x509.UniformResourceIdentifier)
    ]
    return Shown(
        file,
        " ".join(uris) or certificate.subject.rfc4514_string(),
        [str(name.value) for name in names if isinstance(name, x509.DNSName | x509.IPAddress)],
        certificate.not_valid_before_utc,
        certificate.not_valid_after_utc,
        revoked=(certificate.issuer, certificate.serial_number) in revoked,
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
