"""Cases 8 to 16: what a start takes or refuses, in the real process."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support import procs, world
from tests.support.client import Client
from tests.support.gates import Gate
from tests.support.server import TOKEN, Server, ServerFactory

REGISTRY = "tests.crews.stop_crews:CREWS"
CONTROL = {"status", "events", "cancel"}
EXIT_CONFIG, EXIT_START = 2, 3
#: As many processes are started at the same time.
TOGETHER = 4

Variables = Mapping[str, str | None]


def by_environment(make_server: ServerFactory, changes: Variables) -> Server:
    """A server that gets its settings as the reference does, from ``AIP_CREWAI_`` variables alone.

    ``changes``: by the names without that prefix; None takes a variable away.
    """
    in_file = ("host", "port", "registry", "state_file", "allowed_operations", "training_dir")
    server: Server = make_server(registry=REGISTRY, token=None, settings=dict.fromkeys(in_file))
    variables: dict[str, str | None] = {
        "HOST": "127.0.0.1",
        "PORT": "0",
        "REGISTRY": REGISTRY,
        "STATE_FILE": str(server.state_file),
        "BEARER_TOKEN": TOKEN,
        **changes,
    }
    server.environment |= {f"AIP_CREWAI_{name}": value for name, value in variables.items()}
    return server


def refusals(servers: Iterable[Server], status: int) -> list[str]:
    """Start processes that must refuse; returns what each of them said."""
    waiting, said = list(servers), []
    while waiting:
        batch, waiting = waiting[:TOGETHER], waiting[TOGETHER:]
        for server in batch:
            server.launch()
        for server in batch:
            assert server.wait_exit(deadline_s=60) == status, server.log_lines()
            assert "listening" not in [line["event"] for line in server.log_lines()]
            event = "config_refused" if status == EXIT_CONFIG else "start_refused"
            said.append(str(server.wait_log(event)["detail"]))
    return said


def refuse_each(make_server: ServerFactory, variants: Sequence[Variables], *names: str) -> None:
    """Each of ``variants`` is a configuration that the real process refuses, naming each of ``names``."""
    for variant, said in zip(
        variants, refusals([by_environment(make_server, variant) for variant in variants], EXIT_CONFIG), strict=True
    ):
        assert all(name in said for name in names), f"{variant}: {said}"
        assert TOKEN not in said


def health_of(server: Server, token: str | None = TOKEN) -> Any:
    """The health document of a server that was started by ``by_environment``."""
    return Client(server.host, server.port, token=token).health().expect(200)


@pytest.mark.case(8)
def test_a_public_address_needs_a_token(make_server: ServerFactory) -> None:
    """Case 8 (=): not loopback and no token is refused, with and without the flag, also for the default address."""
    public = {"HOST": "0.0.0.0", "BEARER_TOKEN": None}
    variants: list[Variables] = [
        public,
        public | {"ALLOW_UNAUTHENTICATED": "1"},
        public | {"HOST": "::", "ALLOW_UNAUTHENTICATED": "1"},
        public | {"HOST": None},
    ]
    refuse_each(make_server, variants, "token", "not loopback")


@pytest.mark.case(9)
def test_a_public_address_needs_a_journal(make_server: ServerFactory) -> None:
    """Case 9 (=): not loopback, with a token and without a state file, is refused, with and without the flag."""
    public = {"HOST": "0.0.0.0", "STATE_FILE": None}
    refuse_each(make_server, [public, public | {"ALLOW_EPHEMERAL": "true"}], "state_file", "not loopback")


@pytest.mark.case(10)
@pytest.mark.parametrize(("host", "yes"), [("127.0.0.1", "1"), ("::1", "TRUE"), ("localhost", " true ")])
def test_loopback_may_go_without_token_and_journal(make_server: ServerFactory, host: str, yes: str) -> None:
    """Case 10 (=): with both flags a loopback server starts open and without a journal, and says so."""
    open_to_all = {"BEARER_TOKEN": None, "STATE_FILE": None, "ALLOW_UNAUTHENTICATED": yes, "ALLOW_EPHEMERAL": yes}
    server = by_environment(make_server, {"HOST": host, **open_to_all}).start()
    assert health_of(server, token=None)["durable_journal"] is False
    assert Client(server.host, server.port).start("act_1", "instant").status == 200
    assert not server.state_file.parent.exists()


@pytest.mark.case(10)
def test_yes_is_not_a_yes(make_server: ServerFactory) -> None:
    """Case 10 (=): the flags mean yes as ``1`` and ``true`` only."""
    refuse_each(make_server, [{"BEARER_TOKEN": None, "ALLOW_UNAUTHENTICATED": "yes"}], "'yes'", "token")
    refuse_each(make_server, [{"STATE_FILE": None, "ALLOW_EPHEMERAL": "yes"}], "'yes'", "state_file")


@pytest.mark.case(11)
def test_a_token_file_that_is_not_private_or_no_token_is_refused(make_server: ServerFactory, tmp_path: Path) -> None:
    """Case 11 (=): mode, kind, size and content of the file; an inner newline is refused too (+)."""
    good = token_file(tmp_path / "good", TOKEN.encode())
    link = tmp_path / "link"
    link.symlink_to(good)
    files = [
        token_file(tmp_path / "open", TOKEN.encode(), mode=0o640),
        link,
        token_file(tmp_path / "empty", b""),
        token_file(tmp_path / "blank", b" \n\t\n"),
        token_file(tmp_path / "latin", b"caf\xe9"),
        token_file(tmp_path / "large", b"x" * 16_385),
        token_file(tmp_path / "lines", b"one\ntwo\n"),
        tmp_path / "missing",
    ]
    servers = [by_environment(make_server, {"BEARER_TOKEN": None, "BEARER_TOKEN_FILE": str(file)}) for file in files]
    for file, said in zip(files, refusals(servers, EXIT_CONFIG), strict=True):
        assert str(file) in said
    refuse_each(make_server, [{"BEARER_TOKEN_FILE": str(good)}, {"BEARER_TOKEN": " "}], "bearer_token")


@pytest.mark.case(11)
@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_a_private_token_file_is_taken_and_trimmed(make_server: ServerFactory, tmp_path: Path, mode: int) -> None:
    """Case 11 (=): both private modes will do, and the newline at the end is not part of the token."""
    file = token_file(tmp_path / "token", f"{TOKEN}\n".encode(), mode=mode)
    server = by_environment(make_server, {"BEARER_TOKEN": None, "BEARER_TOKEN_FILE": str(file)}).start()
    assert health_of(server)["status"] == "ready"
    assert Client(server.host, server.port, token="another").health().status == 401


def token_file(path: Path, body: bytes, *, mode: int = 0o600) -> Path:
    """A file with exactly that mode."""
    path.write_bytes(body)
    path.chmod(mode)
    return path


BOUNDS = {
    "MAX_CONCURRENCY": (1, 1024),
    "MAX_RETAINED_RUNS": (4, 100_000),  # the default concurrency is 4
    "MAX_EVENTS_PER_RUN": (2, 100_000),
    "MAX_EVENT_BYTES": (1024, 4_194_304),
    "MAX_STATE_BYTES": (1_048_576, 4_294_967_296),
    "STREAM_CHECKPOINT_EVENTS": (1, 10_000),
}


@pytest.mark.case(12)
@pytest.mark.parametrize("name", BOUNDS)
def test_a_number_outside_its_range_is_refused(make_server: ServerFactory, name: str) -> None:
    """Case 12 (=): one below, one above, ``abc`` and empty; the refusal names the variable."""
    low, high = BOUNDS[name]
    wrong = (str(low - 1), str(high + 1), "abc", "")
    refuse_each(make_server, [{name: text} for text in wrong], f"AIP_CREWAI_{name}")


@pytest.mark.case(12)
@pytest.mark.parametrize("end", [0, 1], ids=["lowest", "highest"])
def test_a_number_at_the_end_of_its_range_is_taken(make_server: ServerFactory, end: int) -> None:
    """Case 12 (=): a server with every limit at one end of its range serves; blanks and ``1_000`` are numbers too."""
    limits = {name: f" {bounds[end]:_} " for name, bounds in BOUNDS.items()}
    if end == 0:
        limits["MAX_RETAINED_RUNS"] = "1"
    server = by_environment(make_server, limits).start()
    document = health_of(server)
    assert document["max_retained_runs"] == int(limits["MAX_RETAINED_RUNS"])
    assert document["stream_checkpoint_events"] == BOUNDS["STREAM_CHECKPOINT_EVENTS"][end]
    assert Client(server.host, server.port, token=TOKEN).start("act_1", "instant").status == 200


@pytest.mark.case(12)
def test_the_file_takes_more_retained_runs(start_server: ServerFactory) -> None:
    """Case 12 (+): the TOML setting goes to ten million."""
    server = start_server(registry=REGISTRY, settings={"max_retained_runs": 10_000_000})
    assert health_of(server)["max_retained_runs"] == 10_000_000


@pytest.mark.case(13)
def test_the_list_of_operations_is_trimmed(make_server: ServerFactory) -> None:
    """Case 13 (=): blank entries drop out."""
    server = by_environment(make_server, {"ALLOWED_OPERATIONS": " run , ,batch_run,"}).start()
    assert health_of(server)["operations"] == sorted({"run", "batch_run"} | CONTROL)


@pytest.mark.case(13)
def test_other_lists_of_operations_are_refused(make_server: ServerFactory) -> None:
    """Case 13 (=): an empty list, a control operation and an unknown name."""
    wrong = ("", " , ", "run,status", "run,dance")
    refuse_each(make_server, [{"ALLOWED_OPERATIONS": text} for text in wrong], "AIP_CREWAI_ALLOWED_OPERATIONS")


@pytest.mark.case(14)
def test_a_training_directory_must_be_private(make_server: ServerFactory, tmp_path: Path) -> None:
    """Case 14 (=): ``train`` without a directory, with one that others may write to, or with a symlink is refused."""
    real, link, shared = tmp_path / "real", tmp_path / "link", tmp_path / "shared"
    real.mkdir(mode=0o700)
    link.symlink_to(real)
    shared.mkdir()
    shared.chmod(0o777)
    variants: list[Variables] = [
        {"ALLOWED_OPERATIONS": "run,train", "TRAINING_DIR": directory} for directory in (None, str(shared), str(link))
    ]
    refuse_each(make_server, variants, "training_dir")


@pytest.mark.case(14)
def test_a_missing_training_directory_is_made_private(make_server: ServerFactory, tmp_path: Path) -> None:
    """Case 14 (=): it is created with its parents and mode 0700."""
    directory = tmp_path / "new" / "training"
    changes = {"ALLOWED_OPERATIONS": "run,train", "TRAINING_DIR": str(directory)}
    assert health_of(by_environment(make_server, changes).start())["training_directory"] is True
    assert directory.stat().st_mode & 0o777 == 0o700


# --- one owner ---------------------------------------------------------------------------------------------------


@pytest.mark.case(15)
def test_a_journal_has_one_owner(start_server: ServerFactory, make_server: ServerFactory, tmp_path: Path) -> None:
    """Case 15 (=): a second process on the same state file is refused at once, and the first does not notice."""
    first = start_server(registry=REGISTRY)
    client = first.client()
    before = client.health().expect(200)
    gate = Gate(tmp_path, "act_1")
    with client.stream("act_1", "turnstile", input=gate.input) as stream:
        gate.wait("began")
        second = make_server(registry=REGISTRY, settings={"state_file": str(first.state_file)})
        asked = time.monotonic()
        (said,) = refusals([second], EXIT_START)
        assert time.monotonic() - asked < 10, "it waited for the lock"
        assert str(first.pid) in said
        gate.release()
        assert [event.event for event in stream.rest()] == ["started", "completed"]
    after = client.health().expect(200)
    assert all(after[name] == before[name] for name in ("status", "instance_id", "epoch", "checks"))


@pytest.mark.case(15)
def test_no_worker_inherits_the_lock(start_server: ServerFactory, tmp_path: Path) -> None:
    """Case 15 (+): after SIGKILL an orphan with all of a worker's descriptors holds no lock; the next start succeeds
    at once and has killed the orphan before it serves. B24: nothing temporary stays beside the journal.
    """
    server = start_server(registry=REGISTRY, settings={"pid_namespace": "off"})
    client, heartbeats = server.client(), tmp_path / "heartbeats"
    given = {"heartbeat": str(heartbeats), "then": "block"}
    with client.stream("act_1", "escapee", input=given, complete=False):
        work = world.observe(client, "act_1", heartbeats)
        held = [os.readlink(link) for link in Path(f"/proc/{work.pid}/fd").iterdir() if link.is_symlink()]
        assert not [path for path in held if path.startswith(str(server.state_file))]
        server.kill()
    orphan = procs.read_beats(heartbeats)[0]
    assert procs.alive(orphan.pid, orphan.start_ticks), "nothing has outlived the supervisor, so nothing is proved"
    assert lock_is_free(server)
    server.start()
    assert world.after(heartbeats, time.monotonic_ns()) == []
    view = server.client().get("act_1").expect(200)
    assert (view["status"], view["uncertain_outcome"]) == ("failed", True)
    # A worker of root's could have left its leaf while nobody looked, and the record says that.
    assert view["stop"]["confirmed"] or view["stop"]["reason"] == "escape_possible"
    names = {path.name.removeprefix(server.state_file.name) for path in server.state_file.parent.iterdir()}
    assert names == {"", "-wal", "-shm", ".lock", ".reserve", "work"}


def lock_is_free(server: Server) -> bool:
    """Whether the lock could be had; it is given back at once."""
    with open(f"{server.state_file}.lock", "rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


@pytest.mark.case(16)
@pytest.mark.parametrize("mode", [0o775, 0o777, 0o702])
def test_a_state_directory_that_others_may_write_is_refused(make_server: ServerFactory, mode: int) -> None:
    """Case 16 (=): the journal's parent must be writable by its owner alone; nothing is made in it."""
    server = make_server(registry=REGISTRY)
    server.state_file.parent.mkdir()
    server.state_file.parent.chmod(mode)
    assert f"{mode:04o}" in refusals([server], EXIT_START)[0]
    assert not list(server.state_file.parent.iterdir())


@pytest.mark.case(16)
def test_a_state_directory_that_is_a_symlink_is_refused(make_server: ServerFactory, tmp_path: Path) -> None:
    """Case 16 (=): also when it leads to a directory that would do."""
    server = make_server(registry=REGISTRY)
    real = tmp_path / "real"
    real.mkdir(mode=0o700)
    server.state_file.parent.symlink_to(real)
    assert "symlink" in refusals([server], EXIT_START)[0]
    assert not list(real.iterdir())


@pytest.mark.case(16)
@pytest.mark.parametrize("kind", ["symlink", "directory"])
def test_a_lock_that_is_no_file_is_refused(make_server: ServerFactory, tmp_path: Path, kind: str) -> None:
    """Case 16 (=): the lock's path must be free or a regular file."""
    server = make_server(registry=REGISTRY)
    server.state_file.parent.mkdir(mode=0o700)
    lock = Path(f"{server.state_file}.lock")
    if kind == "symlink":
        (tmp_path / "elsewhere").touch(mode=0o600)
        lock.symlink_to(tmp_path / "elsewhere")
    else:
        lock.mkdir()
    assert str(lock) in refusals([server], EXIT_START)[0]
    assert not server.state_file.exists()


@pytest.mark.case(16)
def test_a_state_directory_that_others_may_read_is_taken(make_server: ServerFactory) -> None:
    """Case 16 (=): 0755 will do; the lock and the journal are private all the same."""
    server = make_server(registry=REGISTRY)
    server.state_file.parent.mkdir()
    server.state_file.parent.chmod(0o755)
    server.start()
    assert server.client().health().expect(200)["status"] == "ready"
    for path in (server.state_file, Path(f"{server.state_file}.lock")):
        assert path.stat().st_mode & 0o777 == 0o600
