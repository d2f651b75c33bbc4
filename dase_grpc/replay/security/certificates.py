"""A development certificate authority, and the certificates that it issues to nodes."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Final

from dase_grpc.errors import CredentialsError
from dase_grpc.replay.security.folders import put, refuse_existing, writing_into
from dase_grpc.replay.security.identity import PREFIX, Identity, Role

try:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ModuleNotFoundError as error:
    raise CredentialsError(
        "`dase certs` needs the cryptography library; install it with pip install 'dase-grpc[certs]'"
    ) from error

CA_DAYS: Final = 365
NODE_DAYS: Final = 30
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

    def line(self, now: datetime) -> str:
        """All of it, for people."""
        left = self.not_after - now
        until = f"valid until {self.not_after:%Y-%m-%d %H:%M} UTC"
        if left < timedelta(0):
            until = f"EXPIRED on {self.not_after:%Y-%m-%d %H:%M} UTC"
        elif now < self.not_before:
            until = f"NOT YET VALID, from {self.not_before:%Y-%m-%d %H:%M} UTC"
        hosts = f", hosts {', '.join(self.hosts)}" if self.hosts else ""
        return f"{self.file}: {self.holder}{hosts}, {until}"


def make_authority(directory: Path, *, now: datetime, days: int = CA_DAYS) -> Path:
    """Makes a certificate authority in a folder: `ca.crt` for everybody and `ca.key` for nobody else."""
    refuse_existing(directory / "ca.crt", directory / "ca.key")
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
        put(directory / "ca.key", _key_pem(key), private=True)
        put(directory / "ca.crt", _pem(certificate))
    return directory / "ca.crt"


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
    with writing_into(folder):
        folder.mkdir(parents=True, exist_ok=True)
        put(folder / "ca.crt", _pem(authority))
        put(folder / "tls.key", _key_pem(key), private=True)
        put(folder / "tls.crt", _pem(certificate.sign(authority_key, hashes.SHA256())))
    return folder


def certificates_in(directory: Path) -> list[Shown]:
    """What the certificates in a folder and in those right below it say; there has to be one."""
    files = sorted({*directory.glob("*.crt"), *directory.glob("*/*.crt")})
    if not files:
        raise CredentialsError(
            f"{directory} holds no certificate; make some with `dase certs init {directory}`"
        )
    return [_shown(file) for file in files]


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
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    others = "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"
    never = dict.fromkeys((*others, "encipher_only", "decipher_only"), False)
    return x509.KeyUsage(digital_signature=not signs, key_cert_sign=signs, crl_sign=signs, **never)


def _host(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(name))
    except ValueError:
        pass
    try:
        return x509.DNSName(name)
    except ValueError as error:
        raise CredentialsError(f"--host {name!r} is neither a host name nor an IP address") from error


def _authority(directory: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    try:
        certificate = x509.load_pem_x509_certificate((directory / "ca.crt").read_bytes())
        key = serialization.load_pem_private_key((directory / "ca.key").read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as error:
        raise CredentialsError(
            f"{directory} holds no usable certificate authority; make one with `dase certs init {directory}`"
        ) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
        raise CredentialsError(f"{directory / 'ca.key'} is not the key of {directory / 'ca.crt'}")
    return certificate, key


def _shown(file: Path) -> Shown:
    try:
        certificate = x509.load_pem_x509_certificate(file.read_bytes())
    except (OSError, ValueError) as error:
        raise CredentialsError(f"{file} is no certificate that can be read") from error
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
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
