"""`dase` and `python -m dase_grpc` as a process: runs the command line, and ends in every case."""

import errno
import io
import logging
import os
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import NoReturn


def run() -> NoReturn:
    """Runs the command line and ends the process with its exit code.

    Threads that an environment has left running do not keep the process from ending.
    """
    code: object = 0
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that knows no λ, a path that is no UTF-8
            stream.reconfigure(errors="backslashreplace")
    try:
        _main()
    except SystemExit as end:
        code = end.code
    except KeyboardInterrupt:  # before a command heeds signals, that is, while modules are loaded
        code = 130
    except BaseException:  # noqa: BLE001 - shown as the interpreter would, then the process ends
        sys.excepthook(*sys.exc_info())
        code = 1
    if any(not each.daemon for each in threading.enumerate() if each is not threading.main_thread()):
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))
    sys.exit(code if code is None or isinstance(code, int) else 1)


def _main() -> None:
    """`main`, where the folder it runs in is gone, or where what it prints goes to a full disk."""
    try:
        Path.cwd()
    except FileNotFoundError:
        sys.stderr.write("error: the current folder does not exist any more; change into one that does\n")
        sys.exit(2)
    from dase_grpc.cli import main

    try:
        main()
    except OSError as error:  # a refused file of ours is a DaseError
        if error.filename is not None or error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
            raise
        sys.stderr.write(f"error: the disk refuses: {error.strerror}; free space\n")
        sys.exit(1)


if __name__ == "__main__":
    run()
