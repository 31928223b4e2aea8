"""The harness itself: a stream that breaks the contract, a torn heartbeat or a process that lives is noticed."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import procs
from tests.support.client import Client, StreamError
from tests.support.server import Log, ServerFailed

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
Serve = Callable[[bytes], Client]


def frame(name: str, sequence: object, *, shown: str | None = None, data: str = "{}") -> bytes:
    """One SSE frame."""
    return f'event: {shown or name}\ndata: {{"event":"{name}","sequence":{sequence},"data":{data}}}\n\n'.encode()


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Answer one request with exactly these bytes and close."""
    with contextlib.ExitStack() as stack:

        def start(answer: bytes) -> Client:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

            def answer_one() -> None:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(65_536)
                    connection.sendall(answer)

            thread = threading.Thread(target=answer_one)
            thread.start()
            stack.callback(thread.join)
            return Client("127.0.0.1", listener.getsockname()[1], token="t", timeout_s=10)

        yield start


def test_a_good_stream_is_read_to_its_end(serve: Serve) -> None:
    body = b"retry: 1000\n\n: hello\n\n" + frame("started", 0) + b"id: 1\n" + frame("chunk", 1) + frame("completed", 2)
    with serve(HEAD + body).follow("a") as stream:
        assert stream.next().event == "started"
        assert stream.until("completed").sequence == 2
        assert [event.event for event in stream.rest()] == ["started", "chunk", "completed"]
        assert (stream.comments, stream.events[1].id) == (1, "1")


@pytest.mark.parametrize(
    "body",
    [
        frame("started", 0),
        frame("started", 1) + frame("completed", 2),
        frame("started", 0) + frame("completed", 2),
        frame("started", 0) + frame("completed", 0),
        frame("started", "0.0") + frame("completed", 1),
        frame("started", "true") + frame("completed", 1),
        frame("completed", 0) + frame("chunk", 1),
        frame("completed", 0, shown="chunk"),
        frame("completed", 0, data="NaN"),
        frame("completed", 0, data='{"a":1,"a":1}'),
        frame("completed", 0).replace(b"data: ", b"data: {}\ndata: "),
        frame("completed", 0).replace(b"event: completed\n", b""),
        frame("completed", 0).replace(b"\n", b"\r\n"),
        frame("completed", 0).replace(b'"data":{}', b'"data":{},"more":1'),
        frame("completed", 0)[:-1],
        b"id: 5\n" + frame("completed", 0),
        b"hello\n\n" + frame("completed", 0),
        frame("completed", 0, data='"' + "x" * 1_048_576 + '"'),
    ],
)
def test_a_bad_stream_is_noticed(serve: Serve, body: bytes) -> None:
    # BadJson for the data, StreamError for the rest.
    with serve(HEAD + body).follow("a") as stream, pytest.raises(Exception) as caught:
        stream.rest()
    assert type(caught.value).__name__ in {"StreamError", "BadJson"}


def test_an_end_before_the_terminal_event_can_be_allowed(serve: Serve) -> None:
    stream = serve(HEAD + frame("chunk", 3)).follow("a", cursor=3, complete=False)
    assert [event.sequence for event in stream] == [3]
    with pytest.raises(StreamError):
        stream.next()
    stream.close()


def test_an_error_instead_of_a_stream_is_shown(serve: Serve) -> None:
    body = b"HTTP/1.1 409 Conflict\r\nContent-Length: 14\r\n\r\n{\"detail\":\"x\"}"
    with pytest.raises(AssertionError, match="409"):
        serve(body).stream("a", "c")


def test_beats_are_read_and_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "beats"
    assert procs.read_beats(path) == []
    path.write_bytes(b"12 34 56\n12 34 57\n12 3")
    assert procs.read_beats(path) == [(12, 34, 56), (12, 34, 57)]
    path.write_bytes(procs.beat_line())
    (beat,) = procs.read_beats(path)
    assert procs.alive(beat.pid, beat.start_ticks)
    path.write_bytes(b"12 34\n")
    with pytest.raises(TypeError):
        procs.read_beats(path)


def test_life_is_told_by_identity() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    ticks = procs.start_ticks(child.pid)
    assert ticks is not None
    assert procs.alive(child.pid, ticks)
    assert not procs.alive(child.pid, ticks + 1)
    assert child.pid in procs.children(os.getpid())
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert procs.start_ticks(child.pid) == ticks
    assert not procs.alive(child.pid, ticks), "a whole zombie is dead"
    child.communicate()
    assert procs.start_ticks(child.pid) is None
    assert not procs.alive(child.pid)


LEADER_EXITS = """
import ctypes, sys, threading
threading.Thread(target=sys.stdin.read).start()
print("ready", flush=True)
ctypes.CDLL(None).syscall(60, 0)
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the number of exit(2) is that of x86-64")
def test_a_process_whose_leader_thread_has_exited_is_alive() -> None:
    child = subprocess.Popen([sys.executable, "-c", LEADER_EXITS], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n"
    stat = Path(f"/proc/{child.pid}/stat")
    procs.wait_until(lambda: stat.read_text().rpartition(") ")[2][0] == "Z", 10, "the leader has exited")
    assert procs.alive(child.pid)
    child.kill()
    child.communicate()
    assert not procs.alive(child.pid)


def log_of(script: str, path: Path) -> Log:
    """The log of a Python process."""
    return Log(subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE), path)


def test_a_log_line_is_waited_for(tmp_path: Path) -> None:
    script = "import sys\nfor n in (1, 2): print('{\"event\":\"e\",\"n\":%d}' % n, file=sys.stderr)\nprint('no json')"
    log = log_of(script, tmp_path / "log")
    assert log.wait("e", deadline_s=20, where={"n": 2})["n"] == 2
    assert log.wait("e", deadline_s=20, skip=1, where={})["n"] == 2
    with pytest.raises(ServerFailed, match="ended first"):
        log.wait("e", deadline_s=20, where={"n": 3})
    assert (tmp_path / "log").read_text().count('"e"') == 2


def test_the_end_of_a_process_is_seen_while_its_child_holds_the_log(tmp_path: Path) -> None:
    holder = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import sys; sys.stdin.read()'])"
    script = f"{holder}; print('{{\"event\":\"last\"}}', file=sys.stderr)"
    reader, writer = os.pipe()
    process = subprocess.Popen([sys.executable, "-c", script], stdin=reader, stderr=subprocess.PIPE)
    os.close(reader)
    log = Log(process, tmp_path / "log")
    assert log.wait("last", deadline_s=20, where={}) == {"event": "last"}
    with pytest.raises(ServerFailed, match="ended first"):
        log.wait("never", deadline_s=20, where={})
    os.close(writer)
    process.wait()
