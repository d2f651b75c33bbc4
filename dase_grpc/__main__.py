"""`dase` and `python -m dase_grpc` as a process: runs the command line, and ends in every case."""

import errno
import io
import signal
import sys
import threading
from pathlib import Path
from typing import Final, NoReturn

from dase_grpc.process import ends

EXIT_S: Final = 10.0
"""How long what was left running may take to end, once the command has; then it is killed."""


def run() -> NoReturn:
    """Runs the command line and ends the process with its exit code.

    Threads that an environment has left running do not keep the process from ending, and its processes,
    for which multiprocessing waits without a limit, do so for `EXIT_S` at most.
    """
    from dase_grpc.process.signals import end_as_init, ignore_repeats

    code: object = 0
    ends.put_right()
    end_as_init()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that knows no λ, a path that is no UTF-8
            stream.reconfigure(errors="backslashreplace")
    try:
        _main()
    except SystemExit as end:
        code = end.code
    except KeyboardInterrupt:  # before a command heeds signals, that is, while modules are loaded
        code = 130
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    except BaseException:  # noqa: BLE001 - shown as the interpreter would, then the process ends
        sys.excepthook(*sys.exc_info())
        code = 1
    ignore_repeats()
    number = code if isinstance(code, int) else int(code is not None)
    if any(not each.daemon for each in threading.enumerate() if each is not threading.main_thread()):
        ends.end_now(number)
    _bounded(threading.Timer(EXIT_S, ends.end_now, (number,)))
    sys.exit(number)


def _bounded(last_resort: threading.Timer) -> None:
    last_resort.daemon = True
    last_resort.start()


def _main() -> None:
    """`main`, where the folder it runs in is gone, or where what it prints goes to a full disk."""
    try:
        Path.cwd()
    except FileNotFoundError:
        sys.stderr.write("error: the current folder does not exist any more; change into one that does\n")
        sys.exit(2)
    too_few_files = ends.too_few_files()
    if too_few_files is not None:
        sys.stderr.write(f"error: {too_few_files}\n")
        sys.exit(2)
    from dase_grpc.cli.main import main

    try:
        main()
    except OSError as error:  # a refused file of ours is a DaseError
        if error.errno in (errno.EMFILE, errno.ENFILE):
            sys.stderr.write(f"error: {error.strerror}; {ends.MORE_FILES}\n")
            sys.exit(1)
        if error.filename is not None or error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
            raise
        sys.stderr.write(f"error: the disk refuses: {error.strerror}; free space\n")
        sys.exit(1)


if __name__ == "__main__":
    run()
