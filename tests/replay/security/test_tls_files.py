"""The files of --tls: which are taken, which are refused, and what is said."""

import shutil

import pytest
from contracts.sentences import assert_one_sentence, refuses

from dase_grpc.errors import CredentialsError
from dase_grpc.replay.security.dialler import Credentials
from dase_grpc.replay.security.door import door_of
from dase_grpc.replay.security.folders import TlsFolder, live_files, read_private


@pytest.fixture
def folder(keyring, tmp_path):
    copy = tmp_path / "tls"
    shutil.copytree(keyring.folder("learner/3"), copy)
    return copy


@pytest.mark.parametrize("mode", [0o644, 0o640 | 0o020, 0o606, 0o666])
def test_a_key_that_others_can_read_or_change_is_refused(folder, mode):
    (folder / "tls.key").chmod(mode)
    with pytest.raises(CredentialsError) as caught:
        Credentials(folder).require_usable()
    assert_one_sentence(caught.value, str(folder / "tls.key"), f"{mode:04o}", "chmod 600")
    assert caught.value.exit_code == 2


def test_a_key_of_root_may_be_read_by_its_group_as_in_a_pod(folder):
    key = folder / "tls.key"
    key.chmod(0o440)
    if key.stat().st_uid == 0:
        assert read_private(key)
    else:
        with pytest.raises(CredentialsError):
            read_private(key)


@pytest.mark.parametrize("name", ["ca.crt", "tls.crt", "tls.key"])
def test_a_file_that_is_missing_or_is_nonsense_is_named(folder, name):
    (folder / name).write_text("nonsense")
    with pytest.raises(CredentialsError) as caught:
        Credentials(folder).require_usable()
    assert_one_sentence(caught.value, name)
    (folder / name).unlink()
    with refuses(CredentialsError, str(folder / name), "No such file"):
        Credentials(folder).require_usable()


def test_a_certificate_and_another_key_are_no_pair(folder, keyring):
    shutil.copy(keyring.folder("learner/4") / "tls.key", folder / "tls.key")
    with pytest.raises(CredentialsError, match="no pair"):
        Credentials(folder).require_usable()


def test_nothing_shows_a_key(folder):
    files = TlsFolder(folder).read()
    assert files.key
    assert "PRIVATE" not in repr(files)


def test_files_that_are_written_one_after_the_other_are_used_once_they_fit(folder, keyring, caplog):
    live, new = live_files(TlsFolder(folder)), keyring.folder("learner/4")
    before = live.value
    assert not live.refresh()
    shutil.copy(new / "tls.key", folder / "tls.key")
    assert not live.refresh()
    assert not live.refresh()
    assert live.value is before
    shutil.copy(new / "tls.crt", folder / "tls.crt")
    assert live.refresh()
    assert live.value == TlsFolder(new).read()
    assert caplog.text.count("still in use") == 1


def test_tokens_without_tls_are_refused(tmp_path):
    with pytest.raises(CredentialsError, match="--tokens needs --tls"):
        door_of(None, tmp_path)
    assert door_of(None, None) is None
