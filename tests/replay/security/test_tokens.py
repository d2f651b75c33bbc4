"""Tokens: each call is signed, once, now, and by somebody the service knows."""

import base64
import hmac
import stat
import time

import grpc
import pytest
from contracts.sentences import assert_one_sentence, refuses
from patience import PATIENCE_S
from replay.security.credentials import guarded, let_in
from replay.wire.services import SCHEMA, Clock, promptly

from dase_grpc.errors import CredentialsError, NotPermittedError, OverloadedError, UnauthenticatedError
from dase_grpc.progress import Progress
from dase_grpc.replay.client.cluster import CLIENT_OPTIONS, ClusterClient, StreamTarget
from dase_grpc.replay.client.insert import Inserter
from dase_grpc.replay.security import tokens
from dase_grpc.replay.security.dialler import Credentials
from dase_grpc.replay.security.identity import Identity
from dase_grpc.replay.security.tokens import (
    TOKEN_KEY,
    WINDOW_S,
    BadToken,
    Secret,
    TokenBook,
    live_secrets,
    make_token,
    read_secret,
    read_secrets,
    sign,
)
from dase_grpc.replay.wire.status import service
from dase_grpc.replay.wire.v1 import cluster_pb2

LEARNER_3 = Secret(Identity.parse("learner/3"), b"x" * 40)
STATUS = "/dase.v1.ClusterService/Status"


@pytest.fixture
def now() -> Clock:
    return Clock(1_000_000.0)


def book(now: Clock, *known: Secret) -> TokenBook:
    return TokenBook(list(known or (LEARNER_3,)), clock=now)


def refused(checked: TokenBook, token: str, method: str = STATUS) -> str:
    with pytest.raises(BadToken) as caught:
        checked.check(method, token)
    assert_one_sentence(caught.value)
    assert "x" * 10 not in str(caught.value)
    return caught.value.reason


# -- one token ----------------------------------------------------------------------------------------


def test_a_token_says_whose_it_is(now):
    assert book(now).check(STATUS, sign(LEARNER_3, STATUS, time_s=now())) == LEARNER_3.identity


def test_a_token_is_accepted_once(now):
    checked, token = book(now), sign(LEARNER_3, STATUS, time_s=now())
    checked.check(STATUS, token)
    assert refused(checked, token) == "replayed_token"
    now.now += WINDOW_S
    assert refused(checked, token) == "replayed_token"
    now.now += 1
    assert refused(checked, token) == "stale_token"


@pytest.mark.parametrize(("offset_s", "accepted"), [(-31, False), (-29, True), (29, True), (31, False)])
def test_a_token_is_accepted_within_its_time_only(now, offset_s, accepted):
    token = sign(LEARNER_3, STATUS, time_s=now() + offset_s)
    if accepted:
        book(now).check(STATUS, token)
    else:
        assert refused(book(now), token) == "stale_token"


def test_a_token_of_the_future_is_remembered_until_its_time_is_over(now):
    checked, token = book(now), sign(LEARNER_3, STATUS, time_s=now() + WINDOW_S - 1)
    checked.check(STATUS, token)
    now.now += 2 * WINDOW_S - 2
    assert refused(checked, token) == "replayed_token"


def test_a_token_is_for_one_method(now):
    token = sign(LEARNER_3, STATUS, time_s=now())
    assert refused(book(now), token, "/dase.v1.PolicyService/Publish") == "unknown_token"


def test_a_token_is_what_the_protocol_says():
    key = b"0123456789abcdefghijklmnopqrstuv"
    made = sign(
        Secret(LEARNER_3.identity, key), STATUS, time_s=1_798_452_000.123, nonce="Zx0aQ3kD9vT1mWcH7b2JxA"
    )
    stated = "v1 learner/3 1798452000123 Zx0aQ3kD9vT1mWcH7b2JxA"
    digest = hmac.digest(key, f"{stated} {STATUS}".encode(), "sha256")
    assert made == f"{stated} {base64.urlsafe_b64encode(digest).decode()[:43]}"


@pytest.mark.parametrize("part", range(1, 5))
def test_nothing_in_a_token_can_be_changed(now, part):
    parts = sign(LEARNER_3, STATUS, time_s=now()).split(" ")
    parts[part] = {1: "learner/4", 2: f"{now() * 1_000 + 1:.0f}", 3: "A" * 22, 4: "A" * 43}[part]
    both = book(now, LEARNER_3, Secret(Identity.parse("learner/4"), b"y" * 40))
    assert refused(both, " ".join(parts)) == "unknown_token"


def test_an_unknown_identity_is_told_the_same_as_a_wrong_secret(now):
    sentences = set()
    for stranger in (Secret(Identity.parse("learner/9"), b"x" * 40), Secret(LEARNER_3.identity, b"z" * 40)):
        with pytest.raises(BadToken) as caught:
            book(now).check(STATUS, sign(stranger, STATUS, time_s=now()))
        sentences.add(str(caught.value))
    assert len(sentences) == 1


@pytest.mark.parametrize(
    "text", ["", "v1", "v1 a b c d", "v2 learner/3 1 " + "A" * 22 + " " + "A" * 43, "v1 king 1 " + "A" * 22]
)
def test_what_is_no_token_is_refused(now, text):
    assert refused(book(now), text) == "malformed_token"


def test_calls_of_one_identity_are_bounded_and_others_do_not_notice(now, monkeypatch):
    monkeypatch.setattr(tokens, "MAX_NONCES", 3)
    other = Secret(Identity.parse("learner/4"), b"y" * 40)
    checked = book(now, LEARNER_3, other)
    for _ in range(3):
        checked.check(STATUS, sign(LEARNER_3, STATUS, time_s=now()))
    with pytest.raises(OverloadedError):
        checked.check(STATUS, sign(LEARNER_3, STATUS, time_s=now()))
    checked.check(STATUS, sign(other, STATUS, time_s=now()))
    now.now += WINDOW_S + 1
    checked.check(STATUS, sign(LEARNER_3, STATUS, time_s=now()))


def test_an_identity_may_have_two_secrets_so_that_one_can_follow_another(now):
    newer = Secret(LEARNER_3.identity, b"z" * 40)
    checked = book(now, LEARNER_3, newer)
    for secret in (LEARNER_3, newer):
        checked.check(STATUS, sign(secret, STATUS, time_s=now()))
    checked.replace([newer])
    assert refused(checked, sign(LEARNER_3, STATUS, time_s=now())) == "unknown_token"


def test_a_secret_is_never_shown():
    assert "xxx" not in repr(LEARNER_3)
    assert "xxx" not in sign(LEARNER_3, STATUS, time_s=1.0)


# -- files --------------------------------------------------------------------------------------------


def secret_file(path, text: str, mode: int = 0o600):
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_folder_of_token_files_is_read_and_hidden_files_in_it_are_not(tmp_path):
    made = [make_token(tmp_path, Identity.parse(name)) for name in ("learner/3", "observer")]
    secret_file(tmp_path / ".hidden", "nonsense")
    (tmp_path / "..data").mkdir()
    assert {str(each.identity) for each in read_secrets(tmp_path)} == {"learner/3", "observer"}
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in made)


def test_a_file_may_hold_many_tokens_and_comments(tmp_path):
    file = secret_file(tmp_path / "t", f"# ours\n\nlearner/3 {'a' * 40}\n learner {'b' * 40}\n")
    assert [str(each.identity) for each in read_secrets(file)] == ["learner/3", "learner"]
    with pytest.raises(CredentialsError, match="2 tokens"):
        read_secret(file)


@pytest.mark.parametrize(
    "text", ["", "# none", "learner/3", f"{'s' * 40} learner/3", "learner/3 short", f"learner/3 {'s' * 40} x"]
)
def test_a_file_that_holds_no_token_is_refused_without_its_words(tmp_path, text):
    with pytest.raises(CredentialsError) as caught:
        read_secrets(secret_file(tmp_path / "t", text))
    assert_one_sentence(caught.value, str(tmp_path / "t"))
    assert "ssss" not in str(caught.value)
    assert "short" not in str(caught.value)


def test_a_folder_that_vanishes_leaves_its_tokens_in_use(tmp_path, caplog):
    make_token(tmp_path / "tokens", Identity.parse("learner/3"))
    live = live_secrets(tmp_path / "tokens")
    (tmp_path / "tokens").rename(tmp_path / "elsewhere")
    assert not live.refresh()
    assert [str(secret.identity) for secret in live.value] == ["learner/3"]
    assert "still in use" in caplog.text
    (tmp_path / "elsewhere").rename(tmp_path / "tokens")
    make_token(tmp_path / "tokens", Identity.parse("learner/4"))
    assert live.refresh()
    assert len(live.value) == 2


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o602, 0o660])
def test_a_token_file_that_others_can_read_or_change_is_refused(tmp_path, mode):
    with refuses(CredentialsError, "chmod 600"):
        read_secrets(secret_file(tmp_path / "t", f"learner/3 {'s' * 40}", mode))


def test_tokens_without_tls_are_refused(tmp_path, keyring):
    with pytest.raises(CredentialsError, match="--token-file needs --tls"):
        Credentials(None, keyring.token("learner/3")).require_usable()


# -- calls --------------------------------------------------------------------------------------------


async def test_a_learner_with_a_token_joins_and_inserts_and_shows_no_certificate(keyring):
    keyring.with_token("learner/3").require_usable()
    async with let_in(keyring, "learner/3", by_token=True, now=time.time()) as (guard, caller):
        member = await caller.join(None)
        assert member.agent_id == 3
        target = StreamTarget(caller.channel, caller.address, member, SCHEMA)
        inserter = await Inserter(target, writer_id="w").open()
        inserter.cancel()
        await caller.cluster.heartbeat(member, Progress())
        assert guard.door.denied == {}
        with pytest.raises(NotPermittedError, match="agent 3"):
            await caller.join(4)


async def test_a_call_without_a_token_is_refused(keyring):
    async with (
        guarded(keyring.folder("replay"), keyring.root / "tokens") as guard,
        guard.as_caller(keyring.with_certificate("learner/3")) as caller,
    ):
        with pytest.raises(UnauthenticatedError) as caught:
            await caller.join(3)
        assert_one_sentence(caught.value, "--token-file")
        assert caught.value.exit_code == 3
        assert guard.door.denied == {"no_token": 1}


async def test_a_token_of_a_machine_whose_clock_is_wrong_is_refused_with_what_to_do(keyring):
    async with let_in(keyring, "learner/3", by_token=True, now=time.time() + 100) as (guard, caller):
        with refuses(UnauthenticatedError, "clock"):
            await caller.join(3)
        assert guard.door.denied == {"stale_token": 1}


async def test_a_token_that_somebody_has_seen_is_of_no_use(keyring, caplog):
    secret = read_secret(keyring.token("learner/3"))
    async with guarded(keyring.folder("replay"), keyring.root / "tokens", now=time.time()) as guard:
        trust = grpc.ssl_channel_credentials((keyring.authority / "ca.crt").read_bytes())
        async with grpc.aio.secure_channel(
            str(guard.address), trust, options=list(CLIENT_OPTIONS)
        ) as channel:
            metadata = ((TOKEN_KEY, sign(secret, STATUS, time_s=guard.wall())),)
            stub = ClusterClient(channel, str(guard.address))._stub
            await stub.Status(cluster_pb2.StatusRequest(), metadata=metadata, timeout=PATIENCE_S)
            with pytest.raises(UnauthenticatedError, match="used before"), service(str(guard.address)):
                await stub.Status(cluster_pb2.StatusRequest(), metadata=metadata, timeout=PATIENCE_S)
        assert guard.door.denied == {"replayed_token": 1}
    assert "denied (replayed_token)" in caplog.text
    assert secret.key.decode() not in caplog.text


async def test_new_tokens_are_used_on_both_sides_without_a_start(keyring, tmp_path):
    file = make_token(tmp_path / "tokens", Identity.parse("learner/3"))
    old = file.read_text()
    async with guarded(keyring.folder("replay"), tmp_path / "tokens", now=time.time()) as guard:
        credentials = Credentials(keyring.folder("replay"), tmp_path / "own.token")
        secret_file(tmp_path / "own.token", old)
        async with guard.as_caller(credentials) as caller:
            member = await caller.join(3)
            make_token(tmp_path / "tokens", Identity.parse("learner/3"), replace=True)
            guard.door.look()
            with pytest.raises(UnauthenticatedError):
                await caller.cluster.heartbeat(member, Progress())
            secret_file(tmp_path / "own.token", file.read_text())
            await promptly(caller.cluster.heartbeat(member, Progress()))
