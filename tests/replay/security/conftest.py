"""Credentials are made once; a test that changes files copies them."""

from pathlib import Path

import pytest
from replay.security.credentials import Keyring, make_keyring
from replay.security.revoking import withdraw

from dase_grpc.replay.client import handoff


@pytest.fixture(scope="session")
def keyring(tmp_path_factory: pytest.TempPathFactory) -> Keyring:
    return make_keyring(tmp_path_factory.mktemp("keyring"))


@pytest.fixture
def ring(tmp_path: Path) -> Keyring:
    """An authority of the test's own, whose list is empty."""
    made = make_keyring(tmp_path / "keyring")
    withdraw(made)
    return made


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes look soon whether a service that does not answer refuses their credentials."""
    monkeypatch.setattr(handoff, "USUAL", handoff.Times(say_silent_after_s=0.2))
