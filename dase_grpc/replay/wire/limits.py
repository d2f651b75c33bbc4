"""Limits that both ends of a channel share: message sizes and keepalive."""

from typing import Final

KEEPALIVE_TIME_MS: Final = 10_000
KEEPALIVE_TIMEOUT_MS: Final = 5_000
MAX_MESSAGE_BYTES: Final = 4 * 2**20

MAX_CHUNK_BYTES: Final = 2**20
CHUNK_BYTES: Final = MAX_CHUNK_BYTES - 1024

REPLAY_TIMEOUT_S: Final = 600.0
"""How long the replay may be away before a node that needs it ends."""
