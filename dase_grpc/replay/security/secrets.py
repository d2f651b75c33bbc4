"""New secrets, and the files that credentials are written to."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from dase_grpc.errors import CredentialsError
from dase_grpc.replay.security.identity import Identity

SECRET_BYTES: Final = 32


def make_token(directory: Path, identity: Identity, *, replace: bool = False) -> Path:
    """Makes a token file for an identity; returns it.

    Raises:
        CredentialsError: it is there and not to be replaced, or cannot be written.
    """
    file = directory / f"{str(identity).replace('/', '-')}.token"
    if not replace:
        refuse_existing(file, remedy="make a new secret with --replace")
    with writing_into(directory):
        directory.mkdir(parents=True, exist_ok=True)
        put(file, f"{identity} {secrets.token_urlsafe(SECRET_BYTES)}\n".encode(), private=True)
    return file


def refuse_existing(*files: Path, remedy: str = "take another folder") -> None:
    """Refuses to write over what is there.

    Raises:
        CredentialsError: one of the files is.
    """
    for file in files:
        if file.exists():
            raise CredentialsError(f"{file} is there already and is not written over; {remedy}")


@contextmanager
def writing_into(directory: Path) -> Iterator[None]:
    """Turns what the system refuses in the block into one sentence.

    Raises:
        CredentialsError: the system refused.
    """
    try:
        yield
    except OSError as error:
        raise CredentialsError(f"cannot write into {directory}: {error.strerror or error}") from error


def put(file: Path, content: bytes, *, private: bool = False) -> None:
    """Writes a file that is there as a whole or not at all, and never, if private, readable by others."""
    staged = file.with_name(f".{file.name}.new")
    staged.unlink(missing_ok=True)
    descriptor = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o644)
    with os.fdopen(descriptor, "wb") as opened:
        opened.write(content)
    staged.replace(file)
