"""mTLS: who is let in, who is not, and what each is told."""

import shutil
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from contracts.sentences import assert_one_sentence, refuses
from replay.security.credentials import MEMBER, guarded, let_in
from replay.wire.services import SCHEMA, promptly, serving

from dase_grpc.errors import CredentialsError, UnauthenticatedError, UnreachableError
from dase_grpc.progress import Progress
from dase_grpc.replay.client.admission import join
from dase_grpc.replay.client.cluster import ClusterClient, Lines, StreamTarget, open_channel
from dase_grpc.replay.client.discovery import find
from dase_grpc.replay.client.handoff import Times
from dase_grpc.replay.client.insert import Inserter
from dase_grpc.replay.client.patience import Wanted
from dase_grpc.replay.client.sample import Sampler
from dase_grpc.replay.security import door
from dase_grpc.replay.security.certificates import issue
from dase_grpc.replay.security.dialler import Credentials
from dase_grpc.replay.security.identity import Identity
from dase_grpc.replay.wire.addresses import Address, ReplayPlace


def without_certificate(keyring, tmp_path) -> Credentials:
    """TLS files without a certificate of one's own, as a node with a token has them."""
    (tmp_path / "ca.crt").write_bytes((keyring.authority / "ca.crt").read_bytes())
    return Credentials(tmp_path, keyring.token("learner/0"))


async def refused(guard, credentials) -> UnauthenticatedError:
    """What a learner that wants to join is told, which must come soon."""
    async with open_channel(guard.address, credentials) as channel:
        wanted = Wanted(
            guard.address,
            0,
            "",
            node_id="n",
            timeout_s=60.0,
            away_s=60.0,
            credentials=credentials,
            timing=Times(say_silent_after_s=0.2),
        )
        with pytest.raises(UnauthenticatedError) as caught:
            await promptly(join(ClusterClient(channel, str(guard.address)), wanted, SCHEMA))
    assert caught.value.exit_code == 3
    return caught.value


@pytest.mark.parametrize(
    ("own", "says"), [(False, "takes TLS only; give this node credentials"), (True, "is not trusted here")]
)
async def test_who_looks_for_shards_behind_a_name_is_told_that_its_credentials_do_not_fit(
    keyring, monkeypatch, own, says
):
    credentials = keyring.with_certificate("learner/0", authority="other") if own else Credentials()
    async with guarded(keyring.folder("replay")) as guard:

        async def resolved(name):
            return (Address(guard.address.host, guard.address.port, server_name=name.host),)

        monkeypatch.setattr("dase_grpc.replay.wire.addresses.resolved", resolved)
        place = ReplayPlace.parse("dns:localhost:1")
        wanted = Wanted(place.addresses[0], 0, "", node_id="n", timeout_s=60.0, away_s=60.0)
        async with Lines(place, credentials) as lines:
            with refuses(UnauthenticatedError, says):
                await promptly(find(lines, wanted))


async def test_a_learner_with_its_certificate_joins_inserts_and_samples(keyring):
    async with let_in(keyring, "learner/3") as (guard, caller):
        member = await caller.join(3)
        target = StreamTarget(caller.channel, caller.address, member, SCHEMA)
        inserter = await Inserter(target, writer_id="w").open()
        sampler = await Sampler(target, batch_size=1).open(credits=0)
        assert inserter.sent_seq == 0
        inserter.cancel()
        sampler.cancel()
        assert guard.door.denied == {}


async def test_the_agent_id_to_join_as_is_that_of_the_certificate(keyring):
    async with guarded(keyring.folder("replay")) as guard:
        async with guard.as_caller(keyring.with_certificate("learner/3")) as caller:
            assert (await caller.join(None)).agent_id == 3
        async with guard.as_caller(keyring.with_certificate("learner")) as caller:
            assert (await caller.join(None)).agent_id == 0
            assert (await caller.join(7)).agent_id == 7


@pytest.mark.parametrize(
    ("shown", "parts"),
    [
        (lambda keyring, _: Credentials(), ("takes TLS only", "--tls")),
        (without_certificate, ("wants a certificate", "--tls")),
        (lambda keyring, _: keyring.with_certificate("learner/3", days_ago=60), ("expired",)),
    ],
    ids=["nothing", "no certificate", "an expired one"],
)
async def test_what_is_missing_or_expired_is_refused_with_what_to_do(keyring, tmp_path, shown, parts):
    async with guarded(keyring.folder("replay")) as guard:
        error = await refused(guard, shown(keyring, tmp_path))
    assert_one_sentence(error, str(guard.address), *parts)


async def test_a_certificate_of_another_authority_is_refused(keyring, tmp_path):
    stranger = tmp_path / "stranger"
    shutil.copytree(keyring.folder("learner/3", authority="other"), stranger)
    async with guarded(keyring.folder("replay")) as guard:
        both_wrong = await refused(guard, Credentials(stranger))
        assert_one_sentence(both_wrong, "is not trusted here", "ca.crt")
        shutil.copy(keyring.authority / "ca.crt", stranger / "ca.crt")
        own_wrong = await refused(guard, Credentials(stranger))
        assert_one_sentence(own_wrong, "does not accept this node's certificate")
        assert not guard.run.opened


def test_a_node_notices_by_itself_that_its_certificate_has_expired(keyring):
    with refuses(CredentialsError, "tls.crt", "expired"):
        keyring.with_certificate("learner/3", days_ago=60).require_usable()
    keyring.with_certificate("learner/3").require_usable()


async def test_a_service_whose_certificate_has_expired_does_not_start(keyring):
    with pytest.raises(CredentialsError, match="expired"):
        async with guarded(keyring.folder("replay", days_ago=60)):
            pass


async def test_a_learner_cannot_pass_for_a_replay(keyring):
    with pytest.raises(CredentialsError, match="purpose"):
        async with guarded(keyring.folder("learner/3")):
            pass


async def test_a_service_that_is_reached_by_another_name_is_not_trusted(keyring, tmp_path):
    for name in ("ca.crt", "ca.key"):
        shutil.copy(keyring.authority / name, tmp_path / name)
    folder = issue(tmp_path, Identity.parse("replay"), ["replay.example"], now=datetime.now(UTC))
    async with guarded(folder) as guard:
        error = await refused(guard, keyring.with_certificate("learner/3"))
        assert_one_sentence(error, "host name")


@pytest.mark.slow
async def test_a_service_at_an_address_of_a_name_must_be_of_that_name(keyring, tmp_path):
    for name in ("ca.crt", "ca.key"):
        shutil.copy(keyring.authority / name, tmp_path / name)
    folder = issue(tmp_path, Identity.parse("replay"), ["replay.test"], now=datetime.now(UTC))
    credentials = keyring.with_certificate("learner/0")
    async with guarded(folder) as guard:
        named = replace(guard, address=replace(guard.address, server_name="replay.test"))
        async with named.as_caller(credentials) as caller:
            assert (await caller.join(0)).agent_id == 0
        await credentials.require_let_in(named.address.host, named.address.port, "replay.test")
        other = replace(guard, address=replace(guard.address, server_name="other.test"))
        async with other.as_caller(credentials) as caller:
            with pytest.raises(UnreachableError):
                await caller.cluster.join(node_name="n", schema=SCHEMA, agent_id=0, timeout_s=0.5)
        with pytest.raises(UnauthenticatedError, match="not trusted here"):
            await credentials.require_let_in(other.address.host, other.address.port, "other.test")


async def test_a_service_without_tls_is_not_talked_to_in_the_clear(keyring):
    async with serving() as plain:
        error = await refused(plain, keyring.with_certificate("learner/3"))
    assert_one_sentence(error, "does not speak TLS")


async def test_connections_that_bring_no_call_are_counted_and_said_once(keyring, caplog):
    async with guarded(keyring.folder("replay")) as guard:
        for _ in range(3):
            async with guard.as_caller(keyring.with_certificate("learner/3", days_ago=60)) as caller:
                with pytest.raises(UnreachableError):
                    await caller.cluster.heartbeat(MEMBER, Progress())
        async with guard.as_caller(keyring.with_certificate("learner/3")) as caller:
            await caller.join(3)
            guard.door.look()
            assert guard.door.denied == {}
            guard.clock.now += door.FAILED_AFTER_S + 1
            await caller.cluster.status()
            guard.door.look()
        assert guard.door.denied == {"handshake": 3}
    said = [record.getMessage() for record in caplog.records if "denied" in record.getMessage()]
    assert len(said) == 1
    assert "of 3 connections" in said[0]


async def test_a_certificate_that_says_no_role_is_refused(keyring, monkeypatch):
    monkeypatch.setattr(door, "PREFIX", "spiffe://another-domain/")
    async with let_in(keyring, "learner/3") as (guard, caller):
        with refuses(UnauthenticatedError, "does not say who it is"):
            await caller.join(3)
        assert guard.door.denied == {"no_identity": 1}
