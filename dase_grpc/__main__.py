"""`dase` and `python -m dase_grpc` as a process: runs the command line, and ends in every case."""

import errno
import gc
import io
import signal
import sys
import threading
from pathlib import Path
from typing import Final, NoReturn

from dase_grpc.process import ends

EXIT_S: Final = 10.0
"""How long what was left running may take to end, once the command has; then it is killed."""

GARBAGE_AFTER: Final = 20_000
"""So many new objects between looks for garbage; with Python's 700 they are a tenth of torch's import."""


def run() -> NoReturn:
    """Runs the command line and ends the process with its exit code.

    Threads that an environment has left running do not keep the process from ending, and its processes,
    for which multiprocessing waits without a limit, do so for `EXIT_S` at most.
    """
    from dase_grpc.process.signals import end_as_init, ignore_repeats

    code: object = 0
    gc.set_threshold(GARBAGE_AFTER)
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
    gc.freeze()  # to look for garbage in all that torch and Matplotlib have made takes a quarter of a second
    sys.exit(number)


def _bounded(last_resort: threading.Timer) -> None:
    last_resort.daemon = True
    last_resort.start()


def _main() -> None:
    """`main`, where the folder it runs in is gone, or where what it prints goes to a full disk."""
    try:
        Path.cwd()
    except FileNotFoundError:
        _end("the current folder does not exist any more; change into one that does", code=2)
    if (too_few_files := ends.too_few_files()) is not None:
        _end(too_few_files, code=2)
    from dase_grpc.cli.main import main

    try:
        main()
    except OSError as error:  # a refused file of ours is a DaseError
        if error.errno in (errno.EMFILE, errno.ENFILE):
            _end(f"{error.strerror}; {ends.MORE_FILES}", code=1)
        if error.filename is not None or error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
            raise
        _end(f"the disk refuses: {error.strerror}; free space", code=1)


def _end(sentence: str, *, code: int) -> NoReturn:
    sys.stderr.write(f"error: {sentence}\n")
    sys.exit(code)


if __name__ == "__main__":
    run()
