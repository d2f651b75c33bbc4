"""`dase` and `python -m dase_grpc` as a process: runs the command line, and ends in every case."""

import io
import logging
import os
import sys
import threading
from contextlib import suppress
from typing import NoReturn

from dase_grpc.cli import main


def run() -> NoReturn:
    """Runs the command line and ends the process with its exit code.

    Threads that an environment has left running do not keep the process from ending.
    """
    code: object = 0
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that knows no λ, a path that is no UTF-8
            stream.reconfigure(errors="backslashreplace")
    try:
        main()
    except SystemExit as end:
        code = end.code
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


if __name__ == "__main__":
    run()
