"""`dase certs`: an authority, certificates and tokens, and what is not written over."""

import fcntl
import os
import stat
import sys
from datetime import UTC, datetime, timedelta

import pytest
from contracts.sentences import assert_one_sentence, refuses
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

from dase_grpc.errors import CredentialsError, UsageError
from dase_grpc.replay.security import certificates
from dase_grpc.replay.security.certificates import issue, make_authority
from dase_grpc.replay.security.dialler import Credentials
from dase_grpc.replay.security.identity import Identity
from dase_grpc.replay.security.tokens import read_secret


def test_an_authority_issues_a_folder_that_a_node_takes(dase, tmp_path):
    assert dase("certs", "init", tmp_path)[0] == 0
    code, out, _ = dase("certs", "issue", tmp_path, "--role", "learner", "--agent", 3)
    assert code == 0
    folder = tmp_path / "learner-3"
    assert out.strip() == str(folder)
    assert {file.name for file in folder.iterdir()} == {"ca.crt", "tls.crt", "tls.key"}
    for key in (folder / "tls.key", tmp_path / "ca.key"):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
    Credentials(folder).require_usable()


def test_what_is_there_is_not_written_over(dase, tmp_path):
    dase("certs", "init", tmp_path)
    dase("certs", "issue", tmp_path, "--role", "learner")
    dase("certs", "token", tmp_path, "--role", "learner")
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    for command in (
        ("init", tmp_path),
        ("issue", tmp_path, "--role", "learner"),
        ("token", tmp_path, "--role", "learner"),
    ):
        code, _, err = dase("certs", *command)
        assert code == 2
        assert "is there already and is not written over" in err
    assert before == {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}


def test_replace_renews_a_certificate_and_a_token(dase, tmp_path):
    dase("certs", "init", tmp_path)
    dase("certs", "issue", tmp_path, "--role", "learner")
    dase("certs", "token", tmp_path, "--role", "learner")
    before = (tmp_path / "learner" / "tls.crt").read_bytes()
    secret = read_secret(tmp_path / "learner.token")
    assert dase("certs", "issue", tmp_path, "--role", "learner", "--replace")[0] == 0
    assert dase("certs", "token", tmp_path, "--role", "learner", "--replace")[0] == 0
    assert (tmp_path / "learner" / "tls.crt").read_bytes() != before
    assert read_secret(tmp_path / "learner.token").key != secret.key
    Credentials(tmp_path / "learner").require_usable()


def test_show_says_whose_and_until_when_and_what_has_expired(dase, tmp_path):
    now = datetime.now(UTC)
    make_authority(tmp_path, now=now)
    issue(tmp_path, Identity.parse("replay"), ["replay.example", "10.0.0.1"], now=now)
    issue(tmp_path, Identity.parse("learner/3"), [], now=now - timedelta(days=60))
    code, out, _ = dase("certs", "show", tmp_path)
    assert code == 0
    lines = {line.split(": ")[0].removeprefix(f"{tmp_path}/"): line for line in out.splitlines()}
    assert "replay, hosts replay.example, 10.0.0.1, valid until" in lines["replay/tls.crt"]
    assert "learner/3, EXPIRED on" in lines["learner-3/tls.crt"]
    assert "DASE development CA" in lines["ca.crt"]
    assert "PRIVATE" not in out


def test_show_tells_of_both_authorities_while_one_follows_the_other(dase, tmp_path):
    now = datetime.now(UTC)
    old, new = (
        make_authority(tmp_path / name, now=now - timedelta(days=days))
        for name, days in (("a", 400), ("b", 0))
    )
    new.write_bytes(new.read_bytes() + old.read_bytes())
    code, out, _ = dase("certs", "show", new.parent)
    assert code == 0
    assert ["EXPIRED" in line for line in out.splitlines()] == [False, True]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--role", "king"), "the roles are replay"),
        (("--role", "observer", "--agent", 1), "acts as no agent"),
        (("--role", "replay"), "--host"),
        (("--role", "replay", "--host", "ä ö"), "neither a host name"),
        (("--role", "replay", "--host", "replay..example"), "neither a host name"),
        (("--role", "replay", "--host", "replay.example:50051"), "give it without a port"),
        (("--role", "replay", "--host", "https://replay.example"), "neither a host name"),
        (("--role", "learner", "--agent", 1024), "there is no agent 1024; agent ids are 0..1023"),
    ],
)
def test_what_cannot_be_issued_is_refused_in_one_sentence(dase, tmp_path, arguments, says):
    dase("certs", "init", tmp_path)
    code, _, err = dase("certs", "issue", tmp_path, *arguments)
    assert code == 2
    assert says in err
    assert not [file for file in tmp_path.iterdir() if file.is_dir()]


def test_a_token_of_an_agent_that_cannot_be_is_not_made_for_it_would_spoil_the_folder(dase, tmp_path):
    code, _, err = dase("certs", "token", tmp_path, "--role", "learner", "--agent", 12_345)
    assert (code, list(tmp_path.iterdir())) == (2, [])
    assert_one_sentence(UsageError(err.strip()), "there is no agent 12345; agent ids are 0..1023")


@pytest.mark.parametrize("command", ["init", "show", "token --role=learner"])
def test_a_folder_that_nobody_can_look_into_is_refused_in_one_sentence(dase, command):
    name, *more = command.split()
    code, out, err = dase("certs", name, "d" * 300, *more)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: cannot read {'d' * 300}")
    assert err.endswith(": File name too long\n")


def test_a_replay_s_certificate_may_be_for_all_hosts_of_a_domain(dase, tmp_path):
    dase("certs", "init", tmp_path)
    assert dase("certs", "issue", tmp_path, "--role", "replay", "--host", "*.replay_1.example")[0] == 0


def test_revoke_withdraws_what_was_issued_to_an_identity_and_show_says_so(dase, tmp_path):
    dase("certs", "init", tmp_path)
    dase("certs", "issue", tmp_path, "--role", "learner", "--agent", 3)
    dase("certs", "issue", tmp_path, "--role", "learner", "--agent", 3, "--replace")
    dase("certs", "issue", tmp_path, "--role", "learner", "--agent", 4)
    code, out, _ = dase("certs", "revoke", tmp_path)
    assert code == 0
    assert out.startswith(f"{tmp_path / 'ca.crl'}: withdrawn nothing; 0 in all, valid until ")
    code, out, _ = dase("certs", "revoke", tmp_path, "--role", "learner", "--agent", 3)
    assert code == 0
    assert "; 2 in all" in out  # the one before the renewal, too
    lines = {line.split(": ")[0]: line for line in dase("certs", "show", tmp_path)[1].splitlines()}
    assert "learner/3, REVOKED" in lines[f"{tmp_path}/learner-3/tls.crt"]
    assert "learner/4, valid until" in lines[f"{tmp_path}/learner-4/tls.crt"]
    code, out, _ = dase("certs", "revoke", tmp_path, "--certificate", tmp_path / "learner-4" / "tls.crt")
    assert "; 3 in all" in out
    assert "withdrawn nothing" in dase("certs", "revoke", tmp_path, "--role", "learner", "--agent", 3)[1]


def test_who_names_no_agent_is_told_which_agents_there_are(dase, tmp_path):
    dase("certs", "init", tmp_path)
    for agent in (3, 4):
        dase("certs", "issue", tmp_path, "--role", "learner", "--agent", agent)
    dase("certs", "issue", tmp_path, "--role", "replay")
    code, _, err = dase("certs", "revoke", tmp_path, "--role", "learner")
    assert code == 2
    assert "has no certificate of learner to withdraw (but of learner/3, learner/4); name its file" in err


def test_a_certificate_from_before_there_was_a_record_is_withdrawn_by_its_folder(dase, tmp_path):
    dase("certs", "init", tmp_path)
    dase("certs", "issue", tmp_path, "--role", "learner")
    (tmp_path / "issued.txt").unlink()
    assert "; 1 in all" in dase("certs", "revoke", tmp_path, "--role", "learner")[1]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--role", "learner", "--agent", 9), "has no certificate of learner/9 to withdraw"),
        (("--role", "king"), "the roles are replay"),
        (("--agent", 3), "the roles are replay"),
        (("--certificate", "ca.key"), "is no certificate"),
        (("--certificate", "other/ca.crt"), "is not a certificate of this authority"),
        (("--certificate", "ca.crt"), "is the authority itself"),
    ],
)
def test_what_cannot_be_withdrawn_is_refused_and_no_list_is_made(dase, tmp_path, arguments, says):
    make_authority(tmp_path, now=datetime.now(UTC))
    make_authority(tmp_path / "other", now=datetime.now(UTC))
    given = [tmp_path / each if "." in str(each) else each for each in arguments]
    code, _, err = dase("certs", "revoke", tmp_path, *given)
    assert code == 2
    assert says in err
    assert not (tmp_path / "ca.crl").exists()


@pytest.mark.parametrize("text", ["", "half a li"])
def test_a_list_or_a_record_that_is_damaged_is_not_written_over(dase, tmp_path, text):
    dase("certs", "init", tmp_path)
    dase("certs", "issue", tmp_path, "--role", "learner")
    (tmp_path / "ca.crl").write_text(text)
    code, _, err = dase("certs", "revoke", tmp_path, "--role", "learner")
    assert code == 2
    assert "is damaged" in err
    assert "copy it back from where it is in use, or where there is no copy, delete it" in err
    assert dase("certs", "show", tmp_path) == (2, "", err)
    assert (tmp_path / "ca.crl").read_text() == text
    (tmp_path / "ca.crl").unlink()
    (tmp_path / "issued.txt").write_text("one two")
    code, _, err = dase("certs", "revoke", tmp_path, "--role", "learner")
    assert code == 2
    assert "issued.txt is damaged" in err


@pytest.mark.parametrize("step", ["own_list", "put"])
def test_nobody_else_withdraws_between_the_list_before_and_the_next(dase, tmp_path, monkeypatch, step):
    dase("certs", "init", tmp_path)
    dase("certs", "issue", tmp_path, "--role", "learner")
    taken, does = [], getattr(certificates, step)

    def looking(*given):
        descriptor = os.open(tmp_path, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(descriptor)
        taken.append(step)
        return does(*given)

    monkeypatch.setattr(certificates, step, looking)
    assert "; 1 in all" in dase("certs", "revoke", tmp_path, "--role", "learner")[1]
    assert taken == [step]


def test_a_list_that_another_tool_has_signed_without_a_number_is_gone_on_with(dase, tmp_path):
    dase("certs", "init", tmp_path)
    dase("certs", "issue", tmp_path, "--role", "learner")
    authority, key = certificates._authority(tmp_path)
    now = datetime.now(UTC)
    plain = x509.CertificateRevocationListBuilder().issuer_name(authority.subject).last_update(now)
    signed = plain.next_update(now + timedelta(days=1)).sign(key, hashes.SHA256())
    (tmp_path / "ca.crl").write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    assert "; 1 in all" in dase("certs", "revoke", tmp_path, "--role", "learner")[1]


@pytest.mark.parametrize("command", ["init new", "issue old --role learner", "revoke old"])
def test_an_end_beyond_the_calendar_is_refused(dase, tmp_path, command):
    make_authority(tmp_path / "old", now=datetime.now(UTC))
    name, folder, *more = command.split()
    code, _, err = dase("certs", name, tmp_path / folder, *more, "--days", 10**9)
    assert code == 2
    assert "take fewer" in err


def test_without_an_authority_nothing_is_issued(dase, tmp_path):
    code, _, err = dase("certs", "issue", tmp_path, "--role", "learner")
    assert code == 2
    assert "dase certs init" in err
    assert dase("certs", "show", tmp_path)[0] == 2


def test_a_key_of_another_authority_is_refused(tmp_path):
    now = datetime.now(UTC)
    for name in ("a", "b"):
        make_authority(tmp_path / name, now=now)
    (tmp_path / "b" / "ca.key").replace(tmp_path / "a" / "ca.key")
    with pytest.raises(CredentialsError) as caught:
        issue(tmp_path / "a", Identity.parse("learner"), [], now=now)
    assert_one_sentence(caught.value, "is not the key of")


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with refuses(CredentialsError, "cannot write"):
        make_authority(tmp_path / "file" / "ca", now=datetime.now(UTC))


def test_without_the_cryptography_library_the_command_says_how_to_get_it(dase, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "cryptography", None)
    monkeypatch.delitem(sys.modules, "dase_grpc.replay.security.certificates", raising=False)
    code, _, err = dase("certs", "init", tmp_path)
    assert code == 2
    assert "dase-grpc[certs]" in err
    assert dase("certs", "token", tmp_path, "--role", "learner")[0] == 0
