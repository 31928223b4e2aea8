"""A disk that is full: nothing new starts, what runs is stopped and proved, and records come when there is room again.

The server runs in a mount namespace of its own where a small tmpfs is its state directory; the test reaches it through
/proc/PID/root.
"""

from __future__ import annotations

import errno
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support import procs
from tests.support.client import Client
from tests.support.server import Server, ServerFactory

#: Twice the journal's reserve must fit beside it, or it is not made again.
SIZE_MIB = 64
RECOVERY_S = 20.0
UNSHARE = ("unshare", "--mount", "--propagation", "private")


def may_mount() -> bool:
    """Whether this machine lets us have a mount namespace."""
    try:
        return subprocess.run([*UNSHARE, "true"], check=False, capture_output=True, timeout=10).returncode == 0
    except OSError:
        return False


pytestmark = pytest.mark.skipif(not may_mount(), reason="no private mount namespace can be had here")


class Disk:
    """The tmpfs of a server, seen from outside."""

    def __init__(self, server: Server) -> None:
        self._root = Path(f"/proc/{server.pid}/root") / server.state_file.parent.relative_to("/")
        self._filler = self._root / "filler"

    def fill(self) -> None:
        """Take every byte that is left."""
        with self._filler.open("ab", buffering=0) as file:
            block = 1 << 20
            while block:
                try:
                    file.write(b"x" * block)
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    block //= 2

    def take_reserve(self) -> None:
        """Remove what the journal keeps for endings, and fill its room."""
        (self._root / "journal.db.reserve").unlink()
        self.fill()

    def free(self) -> None:
        """Give everything back."""
        self._filler.unlink()


@pytest.fixture
def server(make_server: ServerFactory, tmp_path: Path) -> Server:
    """A server whose state, and nothing else of it, is on a small disk."""
    state = tmp_path / "server" / "state"
    state.mkdir(parents=True, mode=0o700)
    mount = f'mount -t tmpfs -o size={SIZE_MIB}m,mode=0700 tmpfs "$0" && exec "$@"'
    return make_server(
        directory=tmp_path / "server",
        registry="tests.crews.counted_crews:CREWS",
        settings={"work_dir": str(tmp_path / "work"), "grace_s": 0, "linger_s": 0.1},
        environment={"EXECUTIONS_FILE": str(tmp_path / "executions")},
        prefix=(*UNSHARE, "sh", "-c", mount, str(state)),
    ).start()


def start(client: Client, action_id: str, crew_id: str, **inputs: Any) -> Any:
    """Start a counted job and wait for its end."""
    return client.start(action_id, crew_id, input={"action": action_id, **inputs})


def ready(client: Client) -> int:
    """Status of the readiness route."""
    return client.request("GET", "/readyz").status


@pytest.mark.case(26)
def test_a_full_disk_refuses_new_work_and_still_records_what_ends(server: Server, tmp_path: Path) -> None:
    client, disk = server.client(), Disk(server)
    start(client, "before", "instant").expect(200)
    with client.stream("running", "ticking", input={"action": "running", "chunks": 900, "every_s": 0.01}) as stream:
        stream.until("chunk")
        disk.fill()
        # Its next events cannot be made durable; the reserve has room for the ending.
        end = stream.rest()[-1]
    assert (end.event, end.data["error_type"]) == ("failed", "JournalUnavailable")
    assert (end.data["uncertain_outcome"], end.data["stop"]["confirmed"]) == (True, True)
    assert start(client, "refused", "instant").status == 507
    assert client.get("refused").status == 404
    start(client, "before", "instant").expect(200)
    assert ready(client) == 503
    assert client.request("GET", "/livez").status == 200
    disk.free()
    procs.wait_until(lambda: ready(client) == 200, RECOVERY_S, "the journal is writable again")
    start(client, "refused", "instant").expect(200)
    assert (tmp_path / "executions").read_text().split() == ["before", "running", "refused"]


def test_without_any_room_work_is_stopped_and_its_record_comes_later(server: Server, tmp_path: Path) -> None:
    client, disk, beats = server.client(), Disk(server), tmp_path / "beats"
    quiet = client.stream("quiet", "beating_sleeper", input={"action": "quiet", "heartbeat": str(beats)})
    busy = client.stream("busy", "ticking", input={"action": "busy", "chunks": 900, "every_s": 0.01})
    with quiet, busy:
        busy.until("chunk")
        procs.wait_until(lambda: procs.read_beats(beats), 10, "a heartbeat")
        workers = [client.get(name).expect(200)["worker"]["pid"] for name in ("quiet", "busy")]
        disk.take_reserve()

        # The job that emits events is stopped at the first that cannot be made durable.
        procs.wait_until(lambda: not procs.alive(workers[1]), 10, "the busy worker is stopped")
        procs.wait_until(lambda: client.get("busy").expect(200)["phase"] == "stopping", 10, "busy is stopping")
        assert client.cancel("busy", "ticking").status == 507
        # A stop does not wait for the journal: the other one is gone when its cancel says that it is not recorded.
        assert client.cancel("quiet", "beating_sleeper", reason="enough").status == 507
        assert not procs.alive(workers[0])
        assert not any(procs.alive(beat.pid, beat.start_ticks) for beat in procs.read_beats(beats))
        for action_id in ("quiet", "busy"):
            view = client.get(action_id).expect(200)
            assert (view["status"], view["phase"]) == ("running", "stopping")
        assert start(client, "refused", "instant").status == 507
        assert ready(client) == 503
        assert client.request("GET", "/livez").status == 200
        assert client.health().expect(200)["checks"]["journal"] is False

        disk.free()
        ends = [quiet.rest()[-1], busy.rest()[-1]]
    assert [end.event for end in ends] == ["cancelled", "failed"]
    assert ends[1].data["error_type"] == "JournalUnavailable"
    assert all(end.data["stop"]["confirmed"] and end.data["uncertain_outcome"] for end in ends)
    assert client.cancel("quiet", "beating_sleeper").expect(200)["status"] == "cancelled"
    procs.wait_until(lambda: ready(client) == 200, RECOVERY_S, "the journal is writable again")
    start(client, "refused", "instant").expect(200)
    assert sorted((tmp_path / "executions").read_text().split()) == ["busy", "quiet", "refused"]
