"""Crews that attack the protocol, the supervisor's memory or their surroundings, and one that reports these."""

from __future__ import annotations

import os
import resource
import signal
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from protocol import frames, pipe
from tests.crews import fake_crews as fakes

#: Where the sandbox puts the protocol's descriptor, or above.
PROTOCOL_FLOOR = 500


def protocol_fd() -> int:
    """The worker's end of its pipe, as any code in the process can find it."""
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        if fd >= PROTOCOL_FLOOR and stat.S_ISSOCK(os.fstat(fd).st_mode):
            return fd
    raise AssertionError("no protocol descriptor")


def say(data: bytes) -> None:
    """Write ``data`` past everything that the worker would check."""
    view = memoryview(data)
    while view:
        view = view[os.write(protocol_fd(), view) :]


def _header(size: int) -> bytes:
    return size.to_bytes(pipe.HEADER_BYTES, "big")


#: Names of attacks and the bytes that each sends.
ATTACKS: dict[str, Callable[[], bytes]] = {
    "garbage": lambda: b"\x00\x00\x00\x08" + os.urandom(8),
    "text": lambda: b"Traceback (most recent call last):\n",
    "zero_length": lambda: _header(0),
    "oversized_header": lambda: _header(pipe.MAX_FRAME_BYTES + 1),
    "huge_header": lambda: _header(2**32 - 1) + b"x" * 65_536,
    "wrong_tag": lambda: _header(15) + b"\x81\xa4type\xa8nonsense",
    "supervisor_tag": lambda: pipe.encode(frames.Cancel()),
    "deep_nesting": lambda: _header(900_000) + b"\x91" * 900_000,
    "chunk_not_json": lambda: pipe.encode(frames.Chunk(data=b"not json")),
    "chunk_not_object": lambda: pipe.encode(frames.Chunk(data=b"[1]")),
    "chunk_nan": lambda: pipe.encode(frames.Chunk(data=b'{"content": NaN}')),
    "chunk_not_utf8": lambda: pipe.encode(frames.Chunk(data=b'{"content": "\xff"}')),
    # A line break would end the SSE frame; a strict reader refuses the other four.
    "chunk_two_lines": lambda: pipe.encode(frames.Chunk(data=b'{"content":\n\n1}')),
    "chunk_twice_the_key": lambda: pipe.encode(frames.Chunk(data=b'{"content":1,"content":2}')),
    "chunk_lone_surrogate": lambda: pipe.encode(frames.Chunk(data=b'{"content":"\\ud800"}')),
    "chunk_infinite": lambda: pipe.encode(frames.Chunk(data=b'{"content":1e400}')),
    "chunk_too_deep": lambda: pipe.encode(frames.Chunk(data=b'{"content":' + b"[" * 200 + b"]" * 200 + b"}")),
    "result_not_json": lambda: pipe.encode(frames.Result(output=b"\x00")),
}


class Attacker:
    """Sends the bytes of ``inputs.attack`` and sleeps."""

    def kickoff(self, inputs: Mapping[str, Any]) -> None:
        say(ATTACKS[inputs["attack"]]())
        time.sleep(60)


class Truncating:
    """Sends half a frame; ``inputs.then`` is ``exit``, or ``close`` of the pipe and a long life."""

    def kickoff(self, inputs: Mapping[str, Any]) -> None:
        say(_header(100) + b"x" * 10)
        if inputs["then"] == "exit":
            os._exit(0)
        # Closing would not end the pipe: the thread that waits in recv holds it open.
        import socket

        with socket.socket(fileno=os.dup(protocol_fd())) as sock:
            sock.shutdown(socket.SHUT_WR)
        time.sleep(60)


class LargeFrames:
    """Keeps to the protocol and breaks a bound: ``inputs.what`` (event or output) has ``inputs.bytes`` characters."""

    def kickoff(self, inputs: Mapping[str, Any]) -> None:
        data = b'{"raw":"%s"}' % (b"x" * int(inputs["bytes"]))
        say(pipe.encode(frames.Chunk(data=data) if inputs["what"] == "event" else frames.Result(output=data)))
        time.sleep(60)


class RawFlood:
    """Sends chunks from two threads as fast as the pipe takes them, past the worker's own bounds, for ever."""

    def kickoff(self, inputs: Mapping[str, Any]) -> None:
        block = pipe.encode(frames.Chunk(data=b'{"content":"%s"}' % (b"x" * 1000))) * 1000
        fd, lock = protocol_fd(), threading.Lock()

        def flood() -> None:
            while True:
                with lock:
                    say_to(fd, block)

        threading.Thread(target=flood, daemon=True).start()
        flood()


def say_to(fd: int, data: bytes) -> None:
    """``say`` where the descriptor is known."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


class Noisy:
    """Prints one line to each stream, then ``inputs.bytes`` characters to stdout, the last of them without an end."""

    def kickoff(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        sys.stderr.write("first error of the crew\n")
        sys.stdout.write("first line of the crew\n")
        size = int(inputs["bytes"])
        sys.stdout.write(("y" * 99 + "\n") * (size // 200))
        sys.stdout.write("z" * (size // 2))
        return fakes.LLM_ANSWER


class Report:
    """Answers with what the process sees of itself."""

    def kickoff(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        descriptors = {}
        for name in os.listdir("/proc/self/fd"):
            if os.path.lexists(f"/proc/self/fd/{name}"):
                descriptors[name] = os.readlink(f"/proc/self/fd/{name}")
        return {
            "raw": "report",
            "pid": os.getpid(),
            "session": os.getsid(0),
            "environ": dict(os.environ),
            "first_environ": Path("/proc/self/environ").read_text(errors="replace").split("\0"),
            "descriptors": descriptors,
            "cwd": os.getcwd(),
            "tempdir": tempfile.gettempdir(),
            "blocked": sorted(int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())),
            "ignored": [int(number) for number in signal.valid_signals() if signal.getsignal(number) == signal.SIG_IGN],
            "term": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
            "core": list(resource.getrlimit(resource.RLIMIT_CORE)),
            "open_files": list(resource.getrlimit(resource.RLIMIT_NOFILE)),
            "oom_score_adj": int(Path("/proc/self/oom_score_adj").read_text()),
            "modes": {place: stat.S_IMODE(os.stat(place).st_mode) for place in (os.getcwd(), os.environ["HOME"])},
        }


def _speak_early() -> None:
    """Make the workers of the crew ``early`` speak before they are told to go: the registry runs in the template."""
    from worker import job

    serve = job._serve

    def early(channel: Any, launch: frames.Launch, *rest: Any) -> int:
        if launch.crew_id == "early":
            channel.send(frames.Chunk(data=b'{"content": "too early"}'))
        return serve(channel, launch, *rest)

    job._serve = early  # type: ignore[assignment]


_speak_early()

CREWS: dict[str, Callable[[], Any]] = {
    **fakes.CREWS,
    "attacker": Attacker,
    "truncating": Truncating,
    "large_frames": LargeFrames,
    "raw_flood": RawFlood,
    "noisy": Noisy,
    "report": Report,
    "early": fakes.Instant,
}
