"""Lists of withdrawn certificates: which are fit, which is the latest, and what a bad one leaves in use."""

import base64
import shutil
import time
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from contracts.sentences import refuses
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.x509.name import _ASN1Type
from replay.security.credentials import guarded
from replay.security.revoking import listed, refused, withdraw

from dase_grpc.errors import CredentialsError
from dase_grpc.replay.security.certificates import certificates_in
from dase_grpc.replay.security.door import Door, door_of
from dase_grpc.replay.security.identity import Role
from dase_grpc.replay.security.revocation import Edition, Revocation, number_of, read_lists
from dase_grpc.replay.security.tokens import BadToken

PRINTABLE = _ASN1Type.PrintableString
"""Another encoding than that of the names which the library makes by itself."""

NOBODY_OF_A_RUN = Role.CLIENT
"""Who may call a policy server alone, see tests/inference/test_policy_server_security.py."""


def unsigned(ring, tmp_path):
    withdraw(ring, authority="other")
    return ring.root / "other" / "ca.crl"


def forged(ring, tmp_path):
    """A list in the authority's name that another has signed."""
    own = x509.load_pem_x509_certificate((ring.authority / "ca.crt").read_bytes())
    key = serialization.load_pem_private_key((ring.root / "other" / "ca.key").read_bytes(), None)
    return written(tmp_path, listing(own.subject), key)


def a_part(ring, tmp_path):
    """A list of what has changed since another, which only who knows that other one can use."""
    own = x509.load_pem_x509_certificate((ring.authority / "ca.crt").read_bytes())
    key = serialization.load_pem_private_key((ring.authority / "ca.key").read_bytes(), None)
    return written(tmp_path, listing(own.subject).add_extension(x509.DeltaCRLIndicator(1), True), key)


def expired(ring, tmp_path):
    withdraw(ring, now=datetime.now(UTC) - timedelta(days=9), days=2)
    return ring.authority / "ca.crl"


def damaged(ring, tmp_path):
    whole = (ring.authority / "ca.crl").read_bytes().splitlines(keepends=True)
    (tmp_path / "list").write_bytes(b"".join([*whole[:2], *whole[3:]]))
    return tmp_path / "list"


def cut_off(ring, tmp_path):
    """A whole list, and another authority's behind it, of which the end is missing."""
    whole = (ring.authority / "ca.crl").read_bytes()
    (tmp_path / "list").write_bytes(whole + whole[: len(whole) // 2])
    return tmp_path / "list"


def endless(ring, tmp_path):
    """So many beginnings that looking for the end of each, up to that of the file, would take for ever."""
    beginnings = b"-----BEGIN X509 CRL-----\n" * 200_000
    (tmp_path / "list").write_bytes((ring.authority / "ca.crl").read_bytes() + beginnings)
    return tmp_path / "list"


def patched(found, old, new):
    """Changes a part of a list or certificate so that it stays well-formed; its signature is then wrong."""
    der = found.public_bytes(serialization.Encoding.DER)
    assert old in der
    kind = "X509 CRL" if isinstance(found, x509.CertificateRevocationList) else "CERTIFICATE"
    text = base64.encodebytes(der.replace(old, new, 1)).decode()
    return f"-----BEGIN {kind}-----\n{text}-----END {kind}-----\n".encode()


AUTHORITY_KEY_ID, CRL_NUMBER = bytes.fromhex("0603551d23"), bytes.fromhex("0603551d14")
"""What names two extensions that every list of ours has."""


def repeating(ring, tmp_path):
    """A list with the same extension twice."""
    found = x509.load_pem_x509_crl((ring.authority / "ca.crl").read_bytes())
    (tmp_path / "list").write_bytes(patched(found, AUTHORITY_KEY_ID, CRL_NUMBER))
    return tmp_path / "list"


def of_another_version(ring, tmp_path):
    found = x509.load_pem_x509_crl((ring.authority / "ca.crl").read_bytes())
    (tmp_path / "list").write_bytes(patched(found, b"\x02\x01\x01", b"\x02\x01\x09"))
    return tmp_path / "list"


def with_a_name_of_another_kind(ring, tmp_path):
    """A list that names its authority's issuer by an X.400 address, which the library does not know."""
    own = x509.load_pem_x509_certificate((ring.authority / "ca.crt").read_bytes())
    key = serialization.load_pem_private_key((ring.authority / "ca.key").read_bytes(), None)
    name = "\x02\x01\x01"  # a number, in an address of the other kind
    issuer = x509.AuthorityKeyIdentifier(None, [x509.RFC822Name(name)], 1)
    made = listing(own.subject).add_extension(issuer, critical=False).sign(key, hashes.SHA256())
    (tmp_path / "list").write_bytes(patched(made, b"\x81\x03\x02\x01\x01", b"\xa3\x03\x02\x01\x01"))
    return tmp_path / "list"


def listing(issuer):
    now = datetime.now(UTC)
    made = x509.CertificateRevocationListBuilder().issuer_name(issuer).last_update(now)
    return made.next_update(now + timedelta(days=1))


def written(folder, made, key):
    content = made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    (folder / "list").write_bytes(content)
    return folder / "list"


UNFIT = {
    "missing": (lambda ring, tmp_path: tmp_path / "none", "cannot read"),
    "empty": (lambda ring, tmp_path: ring.authority / "ca.crt", "holds no revocation list"),
    "damaged": (damaged, "is damaged"),
    "cut off": (cut_off, "is damaged"),
    "endless": (endless, "is damaged"),
    "repeating": (repeating, "is damaged"),
    "of another version": (of_another_version, "is damaged"),
    "with a name of another kind": (with_a_name_of_another_kind, "is damaged"),
    "of another authority": (unsigned, "is not signed by an authority"),
    "forged": (forged, "is not signed by an authority"),
    "a part": (a_part, "is a part of one"),
    "expired": (expired, "has expired"),
}


@pytest.mark.parametrize(("make", "says"), UNFIT.values(), ids=UNFIT)
def test_a_service_does_not_start_with_a_list_that_is_not_fit(ring, tmp_path, make, says):
    with refuses(CredentialsError, says):
        Door(ring.folder("replay"), crl=make(ring, tmp_path))


@pytest.mark.parametrize(("make", "says"), list(UNFIT.values())[1:], ids=list(UNFIT)[1:])
async def test_a_running_service_keeps_the_last_good_list_and_says_so(ring, tmp_path, make, says, caplog):
    used = tmp_path / "used.crl"
    ring.folder("observer")
    withdraw(ring, "observer")
    shutil.copy(ring.authority / "ca.crl", used)
    async with guarded(ring.folder("replay"), crl=used) as guard:
        assert not guard.door.state.lists_unfit
        shutil.copy(make(ring, tmp_path), used)
        for _ in range(3):
            guard.door.look()
        assert guard.door.state.lists_unfit
        async with guard.as_caller(ring.with_certificate("observer")) as caller:
            await refused(caller.cluster.status(), guard, 1)
        withdraw(ring)
        shutil.copy(ring.authority / "ca.crl", used)
        guard.door.look()
        assert not guard.door.state.lists_unfit
    said = [record for record in caplog.records if "still in use" in record.getMessage()]
    assert len(said) == 1
    assert says in said[0].getMessage()


@pytest.mark.parametrize("make", [repeating, of_another_version, with_a_name_of_another_kind])
def test_an_authority_goes_on_with_no_list_that_is_not_fit(ring, tmp_path, make):
    shutil.copy(make(ring, tmp_path), ring.authority / "ca.crl")
    with refuses(CredentialsError, "ca.crl is damaged", "copy it back"):
        withdraw(ring)


@pytest.mark.parametrize(
    ("old", "new"), [(b"\x02\x01\x02", b"\x02\x01\x09"), (b"\x55\x1d\x25", b"\x55\x1d\x23")]
)
def test_a_certificate_that_cannot_be_read_is_refused_wherever_it_is_looked_at(ring, tmp_path, old, new):
    folder = ring.folder("observer")
    found = x509.load_pem_x509_certificate((folder / "tls.crt").read_bytes())
    (folder / "tls.crt").write_bytes(patched(found, old, new))
    with refuses(CredentialsError, "tls.crt"):
        withdraw(ring, None, folder / "tls.crt")
    with refuses(CredentialsError, "tls.crt is no certificate that can be read"):
        certificates_in(folder)


async def test_a_caller_whose_certificate_cannot_be_read_is_refused(ring):
    found = x509.load_pem_x509_certificate((ring.folder("observer") / "tls.crt").read_bytes())
    shown = patched(found, b"\x02\x01\x02", b"\x02\x01\x09")
    context = SimpleNamespace(auth_context=lambda: {"x509_pem_cert": [shown]})
    revocation = Revocation(ring.authority / "ca.crl", ring.authority / "ca.crt", clock=time.time)
    with pytest.raises(BadToken, match="cannot be read"), revocation.call(context):
        pass


async def test_a_list_that_is_older_than_the_one_in_use_lets_nobody_in_again(ring, tmp_path, caplog):
    now = datetime.now(UTC)
    withdraw(ring, now=now - timedelta(hours=1))
    before = shutil.copy(ring.authority / "ca.crl", tmp_path / "before")
    ring.folder("observer")
    withdraw(ring, "observer", now=now)
    async with listed(ring) as guard, guard.as_caller(ring.with_certificate("observer")) as caller:
        shutil.copy(before, ring.authority / "ca.crl")
        guard.door.look()
        assert guard.door.state.lists_unfit
        await refused(caller.cluster.status(), guard, 1)
    assert "was signed before the one in use" in caplog.text


def by_the_clock(ring, tmp_path):
    """The next list of a tool that goes by the clock alone."""
    withdraw(ring, "observer")
    before = x509.load_pem_x509_crl((ring.authority / "ca.crl").read_bytes())
    key = serialization.load_pem_private_key((ring.authority / "ca.key").read_bytes(), None)
    made = listing(before.issuer).add_extension(x509.CRLNumber(number_of(before) + 1), critical=False)
    for each in before:
        made = made.add_revoked_certificate(each)
    return written(tmp_path, made, key)


@pytest.mark.parametrize("next_list", [None, by_the_clock])
async def test_a_list_counts_though_the_authoritys_clock_was_ahead_at_the_one_before(
    ring, tmp_path, caplog, next_list
):
    ring.folder("observer")
    withdraw(ring, now=datetime.now(UTC) + timedelta(minutes=40))
    used = ring.authority / "ca.crl"
    before = shutil.copy(used, tmp_path / "before")
    async with listed(ring) as guard, guard.as_caller(ring.with_certificate("observer")) as caller:
        await caller.cluster.status()
        if next_list is None:
            withdraw(ring, "observer")
        else:
            shutil.copy(next_list(ring, tmp_path), used)
        guard.door.look()
        await refused(caller.cluster.status(), guard, 1)
        assert not guard.door.state.lists_unfit
        shutil.copy(before, used)
        guard.door.look()
        assert guard.door.state.lists_unfit
        await refused(caller.cluster.status(), guard, 2)
    assert "was signed before the one in use" in caplog.text


async def test_a_list_counts_where_the_authority_has_lost_the_one_before(ring):
    for _ in range(3):
        withdraw(ring)
    ring.folder("observer")
    async with listed(ring) as guard, guard.as_caller(ring.with_certificate("observer")) as caller:
        (ring.authority / "ca.crl").unlink()
        withdraw(ring, "observer", now=datetime.now(UTC) + timedelta(minutes=1))
        guard.door.look()
        await refused(caller.cluster.status(), guard, 1)


def test_lists_without_numbers_are_compared_by_their_dates():
    now = datetime.now(UTC)
    later = now + timedelta(minutes=1)
    assert Edition(None, now).precedes(Edition(7, later))
    assert Edition(7, now).precedes(Edition(None, later))
    assert Edition(7, now).precedes(Edition(7, later))
    assert not Edition(7, later).precedes(Edition(7, later))
    assert Edition(6, later).precedes(Edition(7, now))


def test_a_list_is_signed_though_the_clock_was_ahead_beyond_its_end(ring):
    withdraw(ring, now=datetime.now(UTC) + timedelta(days=400))
    made = withdraw(ring, days=1)
    assert read_lists(made.file, ring.authority / "ca.crt", now=datetime.now(UTC)).until <= made.until


async def test_a_list_that_is_taken_away_or_ends_while_the_service_runs_stays_in_use(ring, caplog):
    ring.folder("observer")
    withdraw(ring, "observer")
    async with listed(ring) as guard, guard.as_caller(ring.with_certificate("observer")) as caller:
        (ring.authority / "ca.crl").unlink()
        guard.door.look()
        await refused(caller.cluster.status(), guard, 1)
        guard.wall.now += timedelta(days=400).total_seconds()
        guard.door.look()
        guard.door.look()
        assert guard.door.state.lists_unfit
        assert guard.door.state.lists_until < guard.wall.now
    assert caplog.text.count("has expired and is still in use") == 1


async def test_a_list_that_was_away_and_is_put_back_as_it_was_is_fit_again(ring, tmp_path):
    async with listed(ring) as guard:
        away = (ring.authority / "ca.crl").rename(tmp_path / "away")
        guard.door.look()
        assert guard.door.state.lists_unfit
        away.rename(ring.authority / "ca.crl")
        guard.door.look()
        assert not guard.door.state.lists_unfit


def test_a_list_counts_for_its_authority_however_either_encodes_the_name(ring, tmp_path):
    own = x509.load_pem_x509_certificate((ring.authority / "ca.crt").read_bytes())
    key = serialization.load_pem_private_key((ring.authority / "ca.key").read_bytes(), None)
    other = x509.Name([x509.NameAttribute(each.oid, each.value, PRINTABLE) for each in own.subject])
    assert other.public_bytes() != own.subject.public_bytes()
    entry = x509.RevokedCertificateBuilder().serial_number(7).revocation_date(datetime.now(UTC)).build()
    made = written(tmp_path, listing(other).add_revoked_certificate(entry), key)
    lists = read_lists(made, ring.authority / "ca.crt", now=datetime.now(UTC))
    assert (own.subject, 7) in lists.revoked


def test_an_authority_that_has_no_list_is_named_in_the_log(ring, tmp_path, caplog):
    ring.folder("learner/3", authority="other")
    both = b"".join((ring.root / each / "ca.crt").read_bytes() for each in ("ca", "other"))
    (tmp_path / "ca.crt").write_bytes(both)
    Revocation(ring.authority / "ca.crl", tmp_path / "ca.crt", clock=time.time)
    assert len(caplog.records) == 1
    other = x509.load_pem_x509_certificate((ring.root / "other" / "ca.crt").read_bytes()).subject
    assert f"has no list of {other.rfc4514_string()}, which is in ca.crt" in caplog.text


def test_lists_of_both_authorities_count_while_one_follows_the_other(ring, tmp_path):
    found = set()
    for authority in ("ca", "other"):
        folder = ring.folder("learner/3", authority=authority)
        withdraw(ring, "learner/3", authority=authority)
        found.add(x509.load_pem_x509_certificate((folder / "tls.crt").read_bytes()).serial_number)
    for name in ("ca.crt", "ca.crl"):
        both = b"".join((ring.root / each / name).read_bytes() for each in ("ca", "other"))
        (tmp_path / name).write_bytes(both)
    lists = read_lists(tmp_path / "ca.crl", tmp_path / "ca.crt", now=datetime.now(UTC))
    assert {serial for _, serial in lists.revoked} == found


@pytest.mark.parametrize("tokens", [False, True])
def test_a_list_without_certificates_is_refused(ring, tokens):
    with refuses(CredentialsError, "--crl withdraws certificates"):
        door_of(
            ring.folder("replay") if tokens else None, ring.token("learner/0") if tokens else None, ring.root
        )
