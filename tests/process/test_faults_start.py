"""Starts that must be refused or take another way: a journal with an owner, registries that fail, hang or misbehave."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.support import procs
from tests.support.client import Answer
from tests.support.registries import GOOD, with_registry
from tests.support.server import MARK, Server, ServerFactory

EXIT_START = 3
#: Leaves a thread behind, so that a fork of the importing process would be unsafe.
THREADED = """
    import threading
    threading.Thread(target=threading.Event().wait, daemon=True).start()
"""
OPEN_SOCKET = """
    import socket
    LEFT_OPEN = socket.socketpair()
"""


def refusal(server: Server) -> str:
    """Start a server that must refuse, and leave nothing behind; returns what it says."""
    assert server.run_refused(deadline_s=30) == EXIT_START
    needle = f"{MARK}={server.mark}"
    procs.wait_until(lambda: not procs.with_environment(needle), 5, "what the start began is gone")
    return str(server.wait_log("start_refused")["detail"])


# --- the journal's owner -------------------------------------------------------------------------------------------


@pytest.mark.case(15)
def test_a_second_supervisor_on_one_journal_is_refused_and_the_first_goes_on(
    make_server: ServerFactory, tmp_path: Path
) -> None:
    registry = "tests.crews.fake_crews:CREWS"
    first = make_server(directory=tmp_path / "one", registry=registry).start()
    client = first.client()
    with client.stream("before", "sleeper", input={"seconds": 1}) as stream:
        stream.until("started")
        second = make_server(directory=tmp_path / "one", registry=registry)
        assert f"owned by pid {first.pid};" in refusal(second)
        assert stream.rest()[-1].event == "completed"
    client.start("after", "instant").expect(200)
    first.kill()
    assert first.restart().client().get("after").expect(200)["status"] == "completed"


# --- registries that cannot be loaded ------------------------------------------------------------------------------


def test_a_registry_that_raises_shows_its_traceback(make_server: ServerFactory, tmp_path: Path) -> None:
    said = refusal(with_registry(make_server, tmp_path, "raise LookupError('where is my key')"))
    assert "Traceback (most recent call last)" in said
    assert 'my_registry.py", line 1' in said
    assert "LookupError: where is my key" in said


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ("no_such_registry:CREWS", "no_such_registry"),
        ("my_registry:MISSING", "MISSING"),
        ("my_registry:NUMBER", "NUMBER"),
    ],
)
def test_a_registry_that_is_not_there_is_named(
    make_server: ServerFactory, tmp_path: Path, spec: str, named: str
) -> None:
    server = with_registry(make_server, tmp_path, GOOD, "NUMBER = 7\n")
    server.registry = spec
    assert named in refusal(server)


def test_a_registry_that_ends_its_process_is_refused(make_server: ServerFactory, tmp_path: Path) -> None:
    said = refusal(with_registry(make_server, tmp_path, "import os\nprint('my last words', flush=True)\nos._exit(0)"))
    assert "my_registry:CREWS" in said
    assert "ended" in said
    (log,) = (tmp_path / "server0" / "state" / "work").glob("template*.log")
    assert "my last words" in log.read_text()


def test_a_registry_that_hangs_is_given_up_with_all_that_it_started(make_server: ServerFactory, tmp_path: Path) -> None:
    beats = tmp_path / "beats"
    hang = f"""
        import time
        from tests.crews.heartbeat import detach
        detach({str(beats)!r})
        time.sleep(600)
    """
    said = refusal(with_registry(make_server, tmp_path, hang, registry_timeout_s=1))
    assert "registry_timeout_s = 1 s" in said
    assert beats.exists()
    assert not any(procs.alive(beat.pid, beat.start_ticks) for beat in procs.read_beats(beats))


# --- registries that load and misbehave ----------------------------------------------------------------------------


def test_a_registry_that_prints_a_lot_starts_and_its_output_is_bounded(
    make_server: ServerFactory, tmp_path: Path
) -> None:
    loud = "import os\nfor _ in range(200):\n    os.write(1, b'l' * 65_536)\n    os.write(2, b'e' * 65_536)\n"
    server = with_registry(make_server, tmp_path, loud, GOOD).start()
    assert server.client().start("a", "good").expect(200)["raw"] == "fine"
    (log,) = (server.state_file.parent / "work").glob("template*.log")
    assert 0 < log.stat().st_size <= (1 << 20) + 100


@pytest.mark.parametrize(("left", "why"), [(THREADED, "thread"), (OPEN_SOCKET, "socket:")], ids=["thread", "socket"])
def test_a_registry_that_makes_forks_unsafe_is_spawned(
    make_server: ServerFactory, tmp_path: Path, left: str, why: str
) -> None:
    server = with_registry(make_server, tmp_path, left, GOOD).start()
    client = server.client()
    health = client.health().expect(200)
    assert health["launch_mode"] == "spawn"
    assert why in health["launch_reason"]
    for number in range(3):
        assert client.start(f"a-{number}", "good").expect(200)["raw"] == "fine"


def test_a_fork_that_would_be_unsafe_can_not_be_forced(make_server: ServerFactory, tmp_path: Path) -> None:
    said = refusal(with_registry(make_server, tmp_path, THREADED, GOOD, launch="fork"))
    assert "thread" in said
    assert "spawn" in said


def test_spawned_workers_run_one_after_another_and_at_once(make_server: ServerFactory) -> None:
    registry = "tests.crews.hostile_crews:CREWS"
    server = make_server(registry=registry, settings={"launch": "spawn", "max_concurrency": 4}).start()
    client = server.client()
    assert client.health().expect(200)["launch_mode"] == "spawn"
    pids = [client.start(f"row-{number}", "report").expect(200)["pid"] for number in range(3)]
    answers: dict[str, Answer] = {}

    def run(action_id: str) -> None:
        answers[action_id] = client.start(action_id, "report")

    threads = [threading.Thread(target=run, args=(f"beside-{number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    pids += [answer.expect(200)["pid"] for answer in answers.values()]
    assert len(set(pids)) == 7
    with client.stream("cancelled", "sleeper") as stream:
        stream.until("started")
        view = client.cancel("cancelled", "sleeper").expect(200)
    assert (view["status"], view["stop"]["confirmed"]) == ("cancelled", True)
