"""Crews that try what their user may not do, or take more than their crew is given; each says how far it got."""

from __future__ import annotations

import contextlib
import errno
import getpass
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.crews import adversaries
from tests.crews import fake_crews as fakes

#: In case nobody ends the job, seconds.
PATIENCE_S = 60.0
MIB = 1 << 20


def attempt(act: Callable[[], object]) -> str:
    """``done``, or the name of the error: that of its number where it has one."""
    try:
        act()
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    except Exception as error:  # noqa: BLE001 - whatever stops a crew is its answer here
        return type(error).__name__
    return "done"


def touch(path: str) -> None:
    """Tell the test that something has happened."""
    Path(path).touch()


def keep_something() -> None:
    """What CrewAI does when it is imported: it makes its storage. Others keep things at home."""
    for name in ("CREWAI_STORAGE_DIR", "HOME"):
        place = Path(os.environ[name])
        place.mkdir(parents=True, exist_ok=True)
        (place / f"kept-{os.getpid()}").touch()


#: What came of that in the template.
IMPORTED = attempt(keep_something)


class Prisoner:
    """Tries to ``read`` files, to ``enter`` cgroups and to ``kill`` pids; answers what came of each."""

    def kickoff(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        reads = {path: attempt(lambda path=path: Path(path).read_bytes()) for path in inputs.get("read", ())}
        lists = {path: attempt(lambda path=path: os.listdir(path)) for path in inputs.get("list", ())}
        kills = {str(pid): attempt(lambda pid=pid: os.kill(pid, signal.SIGKILL)) for pid in inputs.get("kill", ())}
        enters = {path: attempt(lambda path=path: self._enter(path)) for path in inputs.get("enter", ())}
        return {
            "raw": "tried",
            "imported": IMPORTED,
            "user": getpass.getuser(),
            "uids": list(os.getresuid()),
            "gids": list(os.getresgid()),
            "groups": os.getgroups(),
            "tries": {**reads, **lists, **kills, **enters},
        }

    def _enter(self, cgroup: str) -> None:
        Path(cgroup, "cgroup.procs").write_text("0", encoding="ascii")


class Trainer(fakes.Instant):
    """``train`` leaves what ``inputs.leaves`` says: a ``file``, a ``fifo`` or a ``link`` to ``inputs.to``."""

    def train(self, n_iterations: int, filename: str, inputs: Mapping[str, Any] | None) -> None:
        match (inputs or {}).get("leaves", "file"):
            case "fifo":
                os.mkfifo(filename)
            case "link":
                os.symlink((inputs or {})["to"], filename)
            case _:
                Path(filename).write_bytes(b"trained")


class ForkBomb:
    """Forks without end, its children too; ``inputs.full`` names a file that is made at the first refusal."""

    def kickoff(self, inputs: Mapping[str, Any]) -> None:
        give_up = time.monotonic() + PATIENCE_S
        while time.monotonic() < give_up:
            try:
                os.fork()
            except OSError as error:
                if error.errno == errno.EAGAIN:
                    touch(inputs["full"])
                time.sleep(0.05)


class ThreadBomb:
    """Starts threads without end; ``inputs.full`` as above."""

    def kickoff(self, inputs: Mapping[str, Any]) -> None:
        forever = threading.Event()
        give_up = time.monotonic() + PATIENCE_S
        while time.monotonic() < give_up:
            try:
                threading.Thread(target=forever.wait, daemon=True).start()
            except RuntimeError:
                touch(inputs["full"])
                time.sleep(0.05)


class Counter:
    """Starts ``inputs.threads`` threads, one after another, all alive at once; answers how many there were."""

    def kickoff(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        forever = threading.Event()
        started = 0
        with contextlib.suppress(RuntimeError):
            for _ in range(int(inputs["threads"])):
                threading.Thread(target=forever.wait, daemon=True).start()
                started += 1
        return fakes.LLM_ANSWER | {"started": started}


class Glutton:
    """Takes ``inputs.bytes`` of memory, more than it is given, in the worker itself; ``inputs.mind``: it minds not."""

    def kickoff(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        if inputs.get("mind"):
            return fakes.LLM_ANSWER | {"memory": attempt(lambda: bytearray(int(inputs["bytes"])))}
        return fakes.LLM_ANSWER | {"taken": len(bytearray(int(inputs["bytes"])))}


class Opener:
    """Opens files until it may not; answers how many and what stopped it."""

    def kickoff(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        held: list[int] = []

        def open_all() -> None:
            while len(held) < 1_000_000:
                held.append(os.open(os.devnull, os.O_RDONLY))

        stopped = attempt(open_all)
        raised = attempt(lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (1 << 19, 1 << 19)))
        for fd in held:
            os.close(fd)
        return fakes.LLM_ANSWER | {"opened": len(held), "stopped": stopped, "raised": raised}


class Writer:
    """Has a child write a file of ``inputs.bytes``, or writes it itself with ``inputs.itself``; answers what came."""

    def kickoff(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        size = int(inputs["bytes"])
        if inputs.get("itself"):
            return fakes.LLM_ANSWER | {"written": Path("file").write_bytes(b"x" * size)}
        # As a shell's child would: Python ignores the signal that dd(1) dies of.
        done = subprocess.run(["dd", "if=/dev/zero", "of=file", f"bs={size}", "count=1", "status=none"], check=False)
        return fakes.LLM_ANSWER | {"child": done.returncode, "size": Path("file").stat().st_size}


class Chatty:
    """Prints ``inputs.bytes`` characters."""

    def kickoff(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        sys.stdout.write(("y" * 99 + "\n") * (int(inputs["bytes"]) // 100))
        return fakes.LLM_ANSWER


CREWS: dict[str, Callable[[], Any]] = {
    **fakes.CREWS,
    **adversaries.CREWS,
    "prisoner": Prisoner,
    "trainer": Trainer,
    "fork_bomb": ForkBomb,
    "thread_bomb": ThreadBomb,
    "counter": Counter,
    "roomy_counter": Counter,
    "glutton": Glutton,
    "squeezed": Glutton,
    "feaster": Glutton,
    "opener": Opener,
    "writer": Writer,
    "free_writer": Writer,
    "chatty": Chatty,
    "free_chatty": Chatty,
    "hurried": fakes.Sleeper,
}
