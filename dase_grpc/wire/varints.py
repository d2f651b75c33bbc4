"""Numbers of protobuf messages that take a fixed number of bytes, so that rows begin where they should."""

from functools import lru_cache


@lru_cache(maxsize=256)
def padded(number: int, length: int) -> bytes:
    """A protobuf varint of that many bytes, as many as the number needs or more."""
    digits = bytearray((number >> (7 * index)) & 0x7F | 0x80 for index in range(length))
    digits[-1] &= 0x7F
    return bytes(digits)
