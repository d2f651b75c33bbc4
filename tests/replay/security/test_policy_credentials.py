"""A policy server with TLS or tokens, and clients that it lets in or not."""

import shutil

import pytest
from contracts.sentences import refuses
from inference.policies import acts, rows
from inference.servers import called, client_of, policy_server

from dase_grpc.errors import CredentialsError, NotPermittedError, UnauthenticatedError, UnreachableError
from dase_grpc.inference.client import PolicyClient


async def test_a_client_with_its_certificate_is_answered_and_other_roles_are_not(keyring):
    async with policy_server(tls=keyring.folder("replay")) as server:
        with client_of(server, tls=keyring.folder("client")) as client:
            assert (await called(client.act, rows(1, 2)) == acts(rows(1, 2))).all()
        with client_of(server, tls=keyring.folder("observer")) as observer:
            assert (await called(lambda: observer.description)).step == 600
            with refuses(NotPermittedError, "role observer, which may not call Act"):
                await called(observer.act, rows(1)[0])
        with (
            client_of(server, tls=keyring.folder("learner/0")) as learner,
            refuses(NotPermittedError, "role learner"),
        ):
            await called(learner.act, rows(1)[0])
        assert 'dase_inference_denied_calls_total{reason="role"} 2.0' in await server.shows()


async def test_strangers_and_plaintext_are_told_why_they_are_not_answered(keyring):
    async with policy_server(tls=keyring.folder("replay")) as server:
        with client_of(server) as plain, refuses(UnauthenticatedError, "takes TLS only"):
            await called(plain.act, rows(1)[0])
        stranger = keyring.folder("client", authority="other")
        with client_of(server, tls=stranger) as client, refuses(UnauthenticatedError, "not trusted here"):
            await called(client.act, rows(1)[0])
    async with policy_server() as server:
        with (
            client_of(server, tls=keyring.folder("client")) as client,
            refuses(UnauthenticatedError, "does not speak TLS"),
        ):
            await called(client.act, rows(1)[0])


async def test_tokens_let_in_whom_they_name(keyring):
    own, others = keyring.token("client"), keyring.token("learner/0")
    async with policy_server(tls=keyring.folder("replay"), tokens=keyring.root / "tokens") as server:
        folder = keyring.folder("client")
        with client_of(server, tls=folder, token_file=own) as client:
            for _ in range(2):  # each call has a token of its own
                assert (await called(client.act, rows(1)) == acts(rows(1))).all()
        with (
            client_of(server, tls=folder, token_file=others) as client,
            refuses(NotPermittedError, "learner"),
        ):
            await called(client.act, rows(1)[0])
        with client_of(server, tls=folder) as client, pytest.raises((UnauthenticatedError, UnreachableError)):
            await called(client.act, rows(1)[0])


async def test_a_client_takes_renewed_files_into_use(keyring, tmp_path):
    folder = shutil.copytree(keyring.folder("client"), tmp_path / "tls")
    async with policy_server(tls=keyring.folder("replay")) as server:
        with client_of(server, tls=folder) as client:
            await called(client.act, rows(1)[0])
            shutil.copytree(keyring.folder("learner/0"), folder, dirs_exist_ok=True)
            with pytest.raises(NotPermittedError):
                await called(client.act, rows(1)[0])


def test_files_that_cannot_be_used_are_refused_before_a_call(tmp_path):
    with refuses(CredentialsError, "cannot read"):
        PolicyClient("127.0.0.1:1", tls=tmp_path)
    with refuses(CredentialsError, "--token-file needs --tls"):
        PolicyClient("127.0.0.1:1", token_file=tmp_path / "t")
