"""Log records as systemd-journald takes them."""

from __future__ import annotations

import io
import logging
import os
import select
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from supervisor import journald
from supervisor.log import JsonLines, configure, get_log


@pytest.fixture
def receiver(tmp_path: Path) -> Iterator[socket.socket]:
    """Where journald would listen."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(tmp_path / "socket"))
        receiver.settimeout(10)
        yield receiver


@pytest.fixture
def logger(receiver: socket.socket) -> Iterator[logging.Logger]:
    """A logger that sends there."""
    handler = journald.Handler(receiver.getsockname())
    handler.setFormatter(JsonLines())
    logger = logging.getLogger("supervisor.of_the_tests")
    logger.propagate, logger.level = False, logging.DEBUG
    logger.handlers[:] = [handler]
    yield logger
    handler.close()
    logger.handlers.clear()


def decode(data: bytes) -> dict[str, str]:
    """Fields of a datagram, both forms."""
    fields: dict[str, str] = {}
    while data:
        line, _, rest = data.partition(b"\n")
        if b"=" in line:
            name, _, value = line.partition(b"=")
        else:
            name, size = line, int.from_bytes(rest[:8], "little")
            value, rest = rest[8 : 8 + size], rest[8 + size :]
            assert rest[:1] == b"\n"
            rest = rest[1:]
        fields[name.decode()] = value.decode()
        data = rest
    return fields


def test_a_fact_has_a_field_for_each_of_its_own(logger: logging.Logger, receiver: socket.socket) -> None:
    get_log(logger.name).warning("job_fenced", action_id="a-1", uncertain=True, count=3, none=None)
    assert decode(receiver.recv(65536)) == {
        "PRIORITY": "4",
        "MESSAGE": "job_fenced action_id=a-1 uncertain=true count=3 none=null",
        "EVENT": "job_fenced",
        "LOGGER": logger.name,
        "SYSLOG_IDENTIFIER": "crew-supervisor",
        "ACTION_ID": "a-1",
        "UNCERTAIN": "true",
        "COUNT": "3",
        "NONE": "null",
    }


@pytest.mark.parametrize(
    ("level", "priority"), [("debug", "7"), ("info", "6"), ("warning", "4"), ("error", "3"), ("critical", "2")]
)
def test_levels_are_priorities(logger: logging.Logger, receiver: socket.socket, level: str, priority: str) -> None:
    getattr(logger, level)("from a library")
    fields = decode(receiver.recv(65536))
    assert (fields["PRIORITY"], fields["MESSAGE"], fields["EVENT"]) == (priority, "from a library", "library")


def test_text_of_several_lines_is_one_field(logger: logging.Logger, receiver: socket.socket) -> None:
    get_log(logger.name).error("start_refused", detail="one\nPRIORITY=0\nthree")
    fields = decode(receiver.recv(65536))
    assert fields["DETAIL"] == "one\nPRIORITY=0\nthree"
    assert fields["PRIORITY"] == "3"


def test_no_field_passes_for_one_of_ours_or_of_journalds(logger: logging.Logger, receiver: socket.socket) -> None:
    get_log(logger.name).info("real", priority=0, message="no", _pid=1, **{"1st": "x", "é-ü": "y", "": "z"})
    fields = decode(receiver.recv(65536))
    assert (fields["PRIORITY"], fields["EVENT"]) == ("6", "real")
    assert fields["MESSAGE"].startswith("real ")
    assert set(fields) == {*journald.OWN, "PID"}


def test_what_is_too_long_goes_to_stderr_whole(
    logger: logging.Logger, receiver: socket.socket, capsys: pytest.CaptureFixture[str]
) -> None:
    get_log(logger.name).info("long", text="x" * 3_000_000)
    assert len(capsys.readouterr().err) > 3_000_000


def test_a_journald_that_is_gone_is_no_error(logger: logging.Logger, receiver: socket.socket) -> None:
    os.unlink(receiver.getsockname())
    get_log(logger.name).info("unheard")


def test_a_journald_that_is_behind_stops_nobody_and_what_was_lost_is_counted(
    logger: logging.Logger, receiver: socket.socket
) -> None:
    for number in range(2000):
        get_log(logger.name).info("many", number=number, text="x" * 2000)
    received = 0
    while select.select([receiver], [], [], 0)[0]:
        received += bool(receiver.recv(65536))
    get_log(logger.name).info("after")
    assert int(decode(receiver.recv(65536))["LOST"]) == 2000 - received > 0


def test_only_the_stream_that_the_variable_names_counts(tmp_path: Path) -> None:
    with (tmp_path / "stream").open("w") as stream:
        found = os.fstat(stream.fileno())
        assert journald.is_connected({"JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino}"}, stream)
        assert not journald.is_connected({"JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino + 1}"}, stream)
        assert not journald.is_connected({}, stream)
    assert not journald.is_connected({"JOURNAL_STREAM": "1:1"}, io.StringIO())


def test_a_stream_of_its_own_stays_json() -> None:
    root = logging.getLogger()
    before = (root.handlers[:], root.level, logging.raiseExceptions)
    out = io.StringIO()
    try:
        configure(stream=out, environ={"JOURNAL_STREAM": "1:1"})
        get_log("x").info("said")
    finally:
        root.handlers[:], logging.raiseExceptions = before[0], before[2]
        root.setLevel(before[1])
    assert out.getvalue().startswith('{"time"')
