"""PID 1: what its two processes pass on to each other."""

from __future__ import annotations

import subprocess
import sys

#: A process that takes itself for PID 1; SIGTERM comes to it as soon as it has forked.
EARLY = """
import os, signal
from supervisor import init

me, fork, getpid = os.getpid(), os.fork, os.getpid

def fork_and_be_told_to_end():
    child = fork()
    if child:
        os.kill(me, signal.SIGTERM)
    return child

signal.signal(signal.SIGTERM, lambda number, frame: os._exit(9 if getpid() == me else 7))
os.getpid = lambda: 1
os.fork = fork_and_be_told_to_end
init.serve_below_init()
signal.pause()
"""
ENDING = """
import os, signal
from supervisor import init
os.getpid = lambda: 1
init.serve_below_init()
{end}
"""


def status_of(program: str) -> int:
    """Exit status of a program."""
    return subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode


def test_a_signal_that_comes_right_after_the_fork_is_passed_on() -> None:
    assert status_of(EARLY) == 7


def test_the_childs_end_is_passed_on() -> None:
    assert status_of(ENDING.format(end="raise SystemExit(3)")) == 3
    assert status_of(ENDING.format(end="signal.raise_signal(signal.SIGKILL)")) == 128 + 9
