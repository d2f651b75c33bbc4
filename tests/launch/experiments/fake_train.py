"""Stands for `dase train` in tests of the runner: starts in milliseconds and behaves as its folder says.

Argument: a folder, then those of `dase`. It leaves `<name>.pid` there, waits for `<name>.go` (or SIGTERM),
and exits with the number in that file, which is gone then.
"""

import os
import signal
import sys
import time
from pathlib import Path


def main() -> None:
    folder, *arguments = sys.argv[1:]
    flags = dict(part.removeprefix("--").split("=", 1) for part in arguments if "=" in part)
    file = Path(folder) / (Path(arguments[-1]).name if arguments[0] == "resume" else flags["name"])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("told to end"))
    file.with_suffix(".args").write_text("\n".join([*arguments, os.environ["OMP_NUM_THREADS"]]))
    file.with_suffix(".new").write_text(str(os.getpid()))
    file.with_suffix(".new").rename(file.with_suffix(".pid"))  # whole, or not there
    go = file.with_suffix(".go")
    while not go.exists():
        time.sleep(0.005)
    sys.stdout.write(f"{file.name} has something to say\n\n")
    code = int(go.read_text() or 0)
    go.unlink()
    if code < 0:
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    main()
