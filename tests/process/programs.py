"""Programs as processes of their own: nodes, one without an event loop, one that still loads."""

import textwrap
from contextlib import contextmanager

from children import python

NODE = """
import asyncio, signal, sys
from dase_grpc.errors import *
from dase_grpc.process import signals
from dase_grpc.process.lifecycle import run_node

async def until_stopped(stop):
    print("ready", flush=True)
    await stop.wait()
    print("draining", flush=True)

{main}

signal.signal(signal.SIGHUP, signal.{hang_up})
sys.exit(run_node("tester", main, stdin_is_leash={leash}))
"""
WAITS = "main = until_stopped"
HANGS = """
async def main(stop):
    await until_stopped(stop)
    await asyncio.Event().wait()
"""
SHORT_LEASH = "signals.LEASHLESS_S = 0.3\n"

WITHOUT_A_LOOP = """
import sys, threading
from dase_grpc.process import lifecycle, signals
signals.LEASHLESS_S = {leashless_s}
with lifecycle.halt_event(stdin_is_leash=True) as halt:
    print("ready", flush=True)
    {main}
print("ended", flush=True)
{after}
"""

LOADS_FIRST = """
import sys, time
from dase_grpc.process.signals import end_with_launcher
from dase_grpc.process.lifecycle import halt_event

end_with_launcher(stdin_is_leash=True)
print("ready", flush=True)
{then}
"""


def ready(process):
    assert process.stdout.readline() == "ready\n"


def node(main=WAITS, *, leash=False, hang_up="SIG_DFL"):
    """A process that runs `main` as a node; `hang_up` is how whoever starts it has it take SIGHUP."""
    return python(NODE.format(main=textwrap.dedent(main), leash=leash, hang_up=hang_up))


@contextmanager
def program(main="halt.wait()", after="", leashless_s=600):
    """A process without an event loop that is on a leash, once it is ready."""
    with python(WITHOUT_A_LOOP.format(main=main, after=after, leashless_s=leashless_s)) as process:
        ready(process)
        yield process


@contextmanager
def loading(then):
    """A process on a leash that has nothing to keep yet, once it is ready."""
    with python(LOADS_FIRST.format(then=textwrap.dedent(then))) as process:
        ready(process)
        yield process
