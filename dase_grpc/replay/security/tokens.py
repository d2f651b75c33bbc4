"""Tokens for nodes without a certificate: calls signed with a secret that the replay knows too."""

import base64
import hashlib
import heapq
import hmac
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from dase_grpc.errors import CredentialsError, OverloadedError
from dase_grpc.replay.security.folders import (
    Live,
    put,
    read_private,
    refuse_existing,
    stamp_of,
    writing_into,
)
from dase_grpc.replay.security.identity import Identity

TOKEN_KEY: Final = "dase-token"
"""The metadata of a call that holds its token."""

WINDOW_S: Final = 30.0
"""How far the time of a token may be from the replay's."""

MAX_NONCES: Final = 100_000
"""Tokens of one identity that are remembered, so that none is used twice."""

MIN_SECRET: Final = 32
NONCE_BYTES: Final = 16
SECRET_BYTES: Final = 32

_TOKEN: Final = re.compile(
    r"v1 (?P<identity>[a-z]{1,16}(?:/[0-9]{1,4})?) (?P<time_ms>[0-9]{1,15}) "
    r"(?P<nonce>[A-Za-z0-9_-]{16,64}) (?P<signature>[A-Za-z0-9_-]{43})"
)
_SECRET: Final = re.compile(rf"[!-~]{{{MIN_SECRET},512}}")


@dataclass(frozen=True)
class Secret:
    """Whose it is, and the secret itself, which is never shown."""

    identity: Identity
    key: bytes = field(repr=False)


class BadToken(Exception):
    """A token that is not accepted; `reason` is a label of a metric."""

    def __init__(self, reason: str, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason


def read_secrets(path: Path) -> list[Secret]:
    """The secrets in a file, or in all files of a folder: lines of an identity, blanks and the secret.

    Empty lines, and those that begin with #, count as nothing; neither do files whose name begins with a dot.
    What cannot be used is a CredentialsError.
    """
    found = [secret for file in _files(path) for secret in _secrets_in(file)]
    if not found:
        raise CredentialsError(f"{path} holds no token; make one with `dase certs token`")
    return found


def read_secret(file: Path) -> Secret:
    """The one secret in a node's token file, see `read_secrets`."""
    found = _secrets_in(file)
    if len(found) != 1:
        raise CredentialsError(f"{file} holds {len(found)} tokens; a node's own file holds one")
    return found[0]


def sign(secret: Secret, method: str, *, time_s: float, nonce: str | None = None) -> str:
    """A token for one call of a method, such as "/dase.v1.ReplayService/Insert", at a time (Unix seconds)."""
    stated = f"v1 {secret.identity} {round(time_s * 1_000)} {nonce or secrets.token_urlsafe(NONCE_BYTES)}"
    return f"{stated} {_signature(secret.key, stated, method)}"


def make_token(directory: Path, identity: Identity, *, replace: bool = False) -> Path:
    """Makes a token file for an identity, if it is not there or to be replaced; returns it."""
    file = directory / f"{str(identity).replace('/', '-')}.token"
    if not replace:
        refuse_existing(file, remedy="make a new secret with --replace")
    with writing_into(directory):
        directory.mkdir(parents=True, exist_ok=True)
        put(file, f"{identity} {secrets.token_urlsafe(SECRET_BYTES)}\n".encode(), private=True)
    return file


class TokenBook:
    """The secrets that a replay knows, and the tokens it has seen within their time.

    Args:
        known: what `read_secrets` gives; an identity may have several, so that one can follow another.
        clock: Unix seconds.
    """

    def __init__(self, known: list[Secret], *, clock: Callable[[], float]) -> None:
        self._keys: Mapping[Identity | None, list[bytes]] = _by_identity(known)
        self._clock = clock
        self._seen: dict[Identity, _Nonces] = {}

    def replace(self, known: list[Secret]) -> None:
        """Takes other secrets from now on; what was seen stays known."""
        self._keys = _by_identity(known)

    def check(self, method: str, token: str) -> Identity:
        """Whose token it is; the same token is not accepted again.

        Raises:
            BadToken: it is not of the form, signed by no known secret, too old, too new, or used before.
            OverloadedError: the identity has made more calls than are remembered.
        """
        match = _TOKEN.fullmatch(token)
        if match is None:
            raise BadToken(
                "malformed_token", "the token of this call is not of the form that the service takes"
            )
        identity = self._signer(match, token.rpartition(" ")[0], method)
        now, then = self._clock(), int(match["time_ms"]) / 1_000
        if abs(now - then) > WINDOW_S:
            raise BadToken(
                "stale_token",
                f"the token of this call is of a time {abs(now - then):.0f} s "
                f"{'behind' if then < now else 'ahead of'} the service's clock, more than {WINDOW_S:g} s; "
                f"set this machine's clock",
            )
        if not self._seen.setdefault(identity, _Nonces()).add(match["nonce"], until=then + WINDOW_S, now=now):
            raise BadToken(
                "replayed_token", "the token of this call was used before; each call needs its own"
            )
        return identity

    def _signer(self, match: re.Match[str], stated: str, method: str) -> Identity:
        """Whose known secret has made the signature."""
        try:
            identity = Identity.parse(match["identity"])
        except CredentialsError:
            identity = None
        keys = self._keys.get(identity) or [secrets.token_bytes(NONCE_BYTES)]  # takes as long
        same = [hmac.compare_digest(_signature(key, stated, method), match["signature"]) for key in keys]
        if identity is None or not any(same):
            raise BadToken(
                "unknown_token",
                "the token of this call is signed with no secret that the service knows; see --token-file "
                "here and --tokens there",
            )
        return identity


class _Nonces:
    """Those of one identity that are still within their time."""

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._ends: list[tuple[float, str]] = []

    def add(self, nonce: str, *, until: float, now: float) -> bool:
        """Remembers a nonce; whether it is new."""
        while self._ends and self._ends[0][0] < now:
            self._known.discard(heapq.heappop(self._ends)[1])
        if nonce in self._known:
            return False
        if len(self._known) >= MAX_NONCES:
            raise OverloadedError(
                f"{MAX_NONCES} calls of this identity within {2 * WINDOW_S:g} s are as many as are taken; "
                f"try again later"
            )
        self._known.add(nonce)
        heapq.heappush(self._ends, (until, nonce))
        return True


def live_secret(file: Path) -> Live[Secret]:
    """A node's own secret, see `read_secret`, for as long as it runs."""
    return Live(f"token of {file}", lambda: stamp_of(file), lambda: read_secret(file))


def live_secrets(path: Path) -> Live[list[Secret]]:
    """The secrets that a replay knows, see `read_secrets`, for as long as it runs."""
    return Live(f"tokens of {path}", lambda: stamp_of(*_files(path)), lambda: read_secrets(path))


def _files(path: Path) -> list[Path]:
    try:
        if path.is_dir():
            return sorted(file for file in path.iterdir() if file.is_file() and not file.name.startswith("."))
    except OSError:  # it cannot be listed, so it cannot be read either, which says why
        pass
    return [path]


def _secrets_in(file: Path) -> list[Secret]:
    try:
        text = read_private(file).decode("ascii")
    except UnicodeDecodeError as error:
        raise CredentialsError(f"{file} is no file of tokens: it is not plain text") from error
    lines = [line.split() for line in text.splitlines()]
    return [
        _secret(file, number, words)
        for number, words in enumerate(lines, 1)
        if words and not words[0].startswith("#")
    ]


def _secret(file: Path, number: int, words: list[str]) -> Secret:
    """One line's secret; what is wrong with a line is said without its words, which may be the secret."""
    if len(words) != 2:
        raise CredentialsError(
            f"line {number} of {file} is not an identity and a secret, as in: learner/3 SECRET"
        )
    try:
        identity = Identity.parse(words[0])
    except CredentialsError:
        raise CredentialsError(
            f"line {number} of {file} does not begin with an identity such as learner/3"
        ) from None
    if not _SECRET.fullmatch(words[1]):
        raise CredentialsError(
            f"the secret in line {number} of {file} has not {MIN_SECRET} to 512 characters; make one with "
            f"`dase certs token`"
        )
    return Secret(identity, words[1].encode())


def _by_identity(found: list[Secret]) -> Mapping[Identity | None, list[bytes]]:
    keys: dict[Identity | None, list[bytes]] = {}
    for secret in found:
        keys.setdefault(secret.identity, []).append(secret.key)
    return keys


def _signature(key: bytes, stated: str, method: str) -> str:
    digest = hmac.new(key, f"{stated} {method}".encode(), hashlib.sha256).digest()
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")
