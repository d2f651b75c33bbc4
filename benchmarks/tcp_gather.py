"""A bare TCP socket that gathers and sends batches: what against_reverb.py holds the replay against.

python tcp_gather.py ROWS WIDTH BATCH

Prints its port, takes one connection, and sends a batch of random rows of WIDTH 4-byte columns for each byte
that it receives: one gather into a buffer that is used again, one `sendall`. No schema, no lease, no counts:
no service could do less.
"""

import socket
import sys
from contextlib import suppress

import numpy as np

MAX_ASKED = 64


def main() -> None:
    """Serves one client until it is gone."""
    count, width, batch = map(int, sys.argv[1:])
    rng = np.random.default_rng(0)
    rows = np.empty((count, width), np.float32)
    rows[:] = rng.standard_normal(width, np.float32)
    gathered = np.empty((batch, width), np.float32)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        client, _ = listener.accept()
        with client:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with suppress(ConnectionError):  # it went with batches unread
                while asked := client.recv(MAX_ASKED):
                    for _ in asked:
                        rows.take(rng.integers(count, size=batch), axis=0, out=gathered, mode="wrap")
                        client.sendall(gathered.data.cast("B"))


if __name__ == "__main__":
    main()
