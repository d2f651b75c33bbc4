"""Large pages: rows drawn at random lie in few of them, so the processor finds soon where each lies.

Most machines give none to files in memory by themselves (`shmem_enabled` is `never`), not even on advice, but
from Linux 6.1 on make them of what is there when told to. What that brings: benchmarks/large_pages.py.
"""

import ctypes
import mmap
import os
from contextlib import suppress
from typing import Final

import numpy as np

LARGE: Final = 2 * 2**20
"""Bytes of a large page, where small ones have 4 KiB."""

_MAP_FIXED: Final = 0x10
_MADV_COLLAPSE: Final = 25


class LargePages:
    """A file that is mapped where large pages can begin. Linux only; the caller keeps the descriptor.

    Attributes:
        bytes: the file's, for as long as someone views them.
    """

    def __init__(self, descriptor: int, size: int, *, writable: bool) -> None:
        protection = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
        # The room that Python owns and gives back; the file then lies over the part that begins well.
        self._room = mmap.mmap(-1, size + LARGE, flags=mmap.MAP_PRIVATE, prot=protection)
        begin = np.frombuffer(self._room, np.uint8).ctypes.data
        self._start, self._size = -begin % LARGE, size
        _map(begin + self._start, size, protection, descriptor)
        advise(self._room)
        self.bytes = memoryview(self._room)[self._start : self._start + size]
        self._large_to = 0

    def reach(self, end: int) -> None:
        """Takes large pages up to `end`; call it before anything is written there, and with growing ends.

        Where there are none, or no more, the writer takes small ones one by one as it goes, which costs more.
        """
        while self._large_to < end and self._large_to + LARGE <= self._size:
            self.bytes[self._large_to] = 0  # an empty stretch is refused
            try:
                self._room.madvise(_MADV_COLLAPSE, self._start + self._large_to, LARGE)
            except OSError:  # an older kernel, or no memory in such large pieces
                self._large_to = self._size
                return
            self._large_to += LARGE


def advise(mapped: mmap.mmap) -> None:
    """Says that large pages are wanted, as NumPy does for large arrays; small ones are read slower.

    A file system that has no large ones, or a kernel without them, goes on with small ones.
    """
    with suppress(OSError):
        mapped.madvise(mmap.MADV_HUGEPAGE)


def _map(address: int, size: int, protection: int, descriptor: int) -> None:
    """Maps a shared file at an address, in the place of what is mapped there."""
    function = ctypes.CDLL(None, use_errno=True).mmap
    function.restype = ctypes.c_void_p
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    if function(address, size, protection, mmap.MAP_SHARED | _MAP_FIXED, descriptor, 0) != address:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
