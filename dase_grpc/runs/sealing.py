"""JSON documents that carry their own checksum, so that a flipped bit in them is found."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

from dase_grpc.errors import RunDirectoryError

SEAL: Final = "sha256"


def sealed(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document with the checksum of all its other entries under `sha256`.

    Raises:
        ValueError, TypeError: it is not JSON, which has neither NaN nor infinity.
    """
    unsealed = {key: value for key, value in document.items() if key != SEAL}
    return {**unsealed, SEAL: _checksum(unsealed)}


def require_seal(document: Mapping[str, Any], what: str) -> None:
    """Checks a document's checksum; `what` begins the sentence that says it is wrong.

    Raises:
        RunDirectoryError: it is missing, or is that of another document.
    """
    if document.get(SEAL) != sealed(document)[SEAL]:
        raise RunDirectoryError(f"{what} does not have the checksum that it names")


def json_text(document: Mapping[str, Any]) -> str:
    """The document as it lies on disk: the same text for the same entries."""
    return json.dumps(document, indent=2, sort_keys=True, allow_nan=False) + "\n"


def _checksum(document: Mapping[str, Any]) -> str:
    return hashlib.sha256(json_text(document).encode()).hexdigest()
