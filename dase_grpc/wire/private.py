"""Files that hold secrets, which nobody but their node may read."""

import os
import stat
from pathlib import Path

from dase_grpc.errors import CredentialsError


def read_private(file: Path) -> bytes:
    """The contents of a file that holds a secret.

    Its group may read it only where root owns the file: so Kubernetes lets a pod's user read a secret.

    Raises:
        CredentialsError: it cannot be read, or others can read or write it.
    """
    try:
        with file.open("rb") as opened:
            found = os.fstat(opened.fileno())
            content = opened.read()
    except OSError as error:
        raise CredentialsError(f"cannot read {file}: {error.strerror or error}") from error
    open_to = stat.S_IRWXO | (stat.S_IWGRP if found.st_uid == 0 else stat.S_IRWXG)
    if found.st_mode & open_to:
        raise CredentialsError(
            f"{file} holds a secret and others can read or change it (mode "
            f"{stat.S_IMODE(found.st_mode):04o}); run `chmod 600 {file}`, and replace the secret if they did"
        )
    return content


def read_public(file: Path) -> bytes:
    """The contents of a file that everybody may read.

    Raises:
        CredentialsError: it cannot be read.
    """
    try:
        return file.read_bytes()
    except OSError as error:
        raise CredentialsError(f"cannot read {file}: {error.strerror or error}") from error
