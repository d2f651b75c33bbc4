"""Nodes with --tls: what they listen on, what they tell, and a learner that trains to its end."""

import os
import signal
from datetime import UTC, datetime
from pathlib import Path

import pytest
from nodes.processes import learner_arguments, process, replay_process
from nodes.running import replay_node
from replay.security.credentials import Caller, make_keyring
from replay.wire.services import promptly

from dase_grpc.cli.main import main
from dase_grpc.errors import AddressError, CredentialsError, NotPermittedError
from dase_grpc.launch.forks import node_variables
from dase_grpc.metrics.buffer import ReplayCollector, ReplayCounts
from dase_grpc.replay.client.cluster import open_channel
from dase_grpc.replay.security.certificates import revoke
from dase_grpc.replay.security.identity import Identity
from dase_grpc.replay.service import monitor
from dase_grpc.replay.wire.addresses import Address

EVERYWHERE = Address("0.0.0.0", 0)


async def test_a_replay_with_tls_may_listen_beyond_loopback_and_one_without_may_not(keyring):
    with pytest.raises(AddressError, match="--tls DIR"):
        async with replay_node(listen=EVERYWHERE):
            pass
    async with (
        replay_node(listen=EVERYWHERE, tls=keyring.folder("replay")) as replay,
        open_channel(
            Address("127.0.0.1", replay.address.port), keyring.with_certificate("observer")
        ) as channel,
    ):
        status = await promptly(Caller(channel, "a").cluster.status())
        assert status.run_id == "the-run"


async def test_its_prometheus_endpoint_is_no_more_protected_for_it(keyring):
    with pytest.raises(AddressError, match="--insecure"):
        async with replay_node(tls=keyring.folder("replay"), metrics_host="0.0.0.0", metrics_port=9_999):
            pass


async def test_a_replay_with_files_that_do_not_fit_does_not_start(keyring, tmp_path):
    with pytest.raises(CredentialsError, match="No such file"):
        async with replay_node(tls=tmp_path):
            pass


async def test_a_replay_node_counts_whom_it_refuses(keyring, monkeypatch):
    registered: list[ReplayCollector] = []
    monkeypatch.setattr(
        monitor, "ReplayCollector", lambda read: registered.append(ReplayCollector(read)) or registered[0]
    )
    async with (
        replay_node(tls=keyring.folder("replay")) as replay,
        open_channel(replay.address, keyring.with_certificate("learner/3")) as channel,
    ):
        with pytest.raises(NotPermittedError):
            await Caller(channel, str(replay.address)).join(4)
        families = {family.name: family for family in registered[0].collect()}
    samples = families["dase_replay_denied_calls"].samples
    assert [(sample.name, sample.labels, sample.value) for sample in samples] == [
        ("dase_replay_denied_calls_total", {"reason": "agent"}, 1)
    ]
    assert ReplayCounts().door.denied == {}


def test_the_nodes_of_one_machine_do_not_inherit_credentials(monkeypatch, tmp_path):
    secret = {"DASE_TLS", "DASE_TOKENS", "DASE_TOKEN_FILE", "DASE_CRL"}
    for name in secret:
        monkeypatch.setenv(name, str(tmp_path))
    given = node_variables(os.environ, threads=3)
    assert not secret & given.keys()
    assert given["OMP_NUM_THREADS"] == given["MKL_NUM_THREADS"] == "3"
    kept = given.keys() - {"OMP_NUM_THREADS", "MKL_NUM_THREADS"}
    assert kept
    assert all(given[name] == os.environ[name] for name in kept)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--role=learner", "--tokens=t"), "--tokens is not for --role learner"),
        (("--role=replay", "--token-file=t"), "--token-file is not for --role replay"),
        (("--role=learner", "--crl=c"), "--crl is not for --role learner"),
    ],
)
def test_credentials_for_another_role_are_refused(monkeypatch, capsys, arguments, says):
    monkeypatch.setattr("sys.argv", ["dase", "node", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("role", "variable"), [("learner", "DASE_TOKENS"), ("learner", "DASE_CRL"), ("replay", "DASE_TOKEN_FILE")]
)
def test_credentials_for_another_role_may_stand_in_the_environment(monkeypatch, capsys, role, variable):
    """As where all nodes of a machine are started from one shell; what follows is read after them."""
    monkeypatch.setenv(variable, "for-another-node")
    monkeypatch.setattr("sys.argv", ["dase", "node", f"--role={role}", "--metrics-host=.none"])
    with pytest.raises(SystemExit):
        main()
    assert "--metrics-host '.none' is no host" in capsys.readouterr().err


@pytest.mark.slow
def test_a_learner_trains_to_its_end_with_its_certificate_and_a_stranger_ends_for_good(
    keyring, tmp_path: Path, monkeypatch
):
    with replay_process(f"--tls={keyring.folder('replay')}") as (replay, address):
        monkeypatch.setenv("DASE_TLS", str(keyring.folder("learner/0")))
        short = learner_arguments(address, tmp_path / "run", train__steps=300)
        with process(*short) as learner:
            assert learner.exit_code() == 0, learner.log
        assert "joined run" in learner.log
        assert "finished after 300 steps" in learner.log
        monkeypatch.setenv("DASE_TLS", str(keyring.folder("learner/0", authority="other")))
        with process(*short) as stranger:
            assert stranger.exit_code() == 3, stranger.log
        assert "is not trusted here" in stranger.log
        replay.until_says("denied (handshake)")
        assert "Handshake failed" not in replay.log
        assert "PRIVATE" not in replay.log + learner.log + stranger.log


@pytest.mark.slow
def test_a_learner_whose_certificate_is_withdrawn_ends_and_goes_on_with_a_new_one(tmp_path, monkeypatch):
    ring, identity = make_keyring(tmp_path / "keyring"), Identity.parse("learner/0")
    crl = revoke(ring.authority, now=datetime.now(UTC)).file
    monkeypatch.setenv("DASE_TLS", str(ring.folder("learner/0")))
    with replay_process(f"--tls={ring.folder('replay')}", f"--crl={crl}") as (replay, address):
        arguments = [*learner_arguments(address, tmp_path / "run"), "--agent=0"]
        with process(*arguments) as learner:
            learner.until_says("evaluation")
            revoke(ring.authority, identity, now=datetime.now(UTC))
            assert learner.exit_code() == 3, learner.log
        assert "is withdrawn; if the node is to go on" in learner.log
        assert "is kept in" in learner.log
        assert "Traceback" not in learner.log
        replay.until_says("denied (revoked): spiffe://dase/learner/0 at")
        ring.folder("learner/0", replace=True)
        with process(*arguments, "--resume") as renewed:
            renewed.until_says("resuming from")
            renewed.send(signal.SIGTERM)
            assert renewed.exit_code() == 0, renewed.log
        assert "Traceback" not in replay.log + renewed.log
