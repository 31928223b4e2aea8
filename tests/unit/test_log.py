"""One JSON line per fact."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from supervisor.log import bind, configure, get_log


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """Where the log goes during the test; logging is as before afterwards."""
    root = logging.getLogger()
    before = (root.handlers[:], root.level, logging.raiseExceptions)
    out = io.StringIO()
    configure(stream=out)
    yield out
    root.handlers[:], logging.raiseExceptions = before[0], before[2]
    root.setLevel(before[1])


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    """What was written, each line by itself."""
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_fact_is_one_line_with_its_fields(stream: io.StringIO) -> None:
    get_log("supervisor.x").info("listening", host="::1", port=8090, path=Path("/a"), crews=["a\nb", "é"], none=None)
    (line,) = lines(stream)
    assert datetime.fromisoformat(line.pop("time")).utcoffset() is not None
    assert line == {
        "level": "info", "logger": "supervisor.x", "event": "listening", "host": "::1", "port": 8090, "path": "/a",
        "crews": ["a\nb", "é"], "none": None,
    }  # fmt: skip
    assert stream.getvalue().isascii()


def test_a_field_cannot_pass_for_the_event_level_or_time(stream: io.StringIO) -> None:
    get_log("x").warning("real", level="debug", time="never", logger="y")
    (line,) = lines(stream)
    assert (line["event"], line["level"], line["logger"]) == ("real", "warning", "x")
    assert line["time"] != "never"


def test_percent_signs_are_text(stream: io.StringIO) -> None:
    get_log("x").error("100%s", text="%d")
    assert lines(stream)[0]["event"] == "100%s"


def test_numbers_that_json_has_not_are_text(stream: io.StringIO) -> None:
    get_log("x").info("odd", value=float("nan"), other=1)
    assert lines(stream)[0]["value"] == "nan"


def test_a_failure_has_its_class_and_places_and_not_its_text(stream: io.StringIO) -> None:
    try:
        raise ValueError("the prompt of a customer")
    except ValueError as error:
        get_log("x").failure("unexpected", error, action_id="a1")
    (line,) = lines(stream)
    assert (line["error_type"], line["action_id"], line["level"]) == ("ValueError", "a1", "error")
    assert line["places"][-1].startswith("test_log.py:")
    assert "customer" not in stream.getvalue()


def test_debug_is_silent_by_default(stream: io.StringIO) -> None:
    get_log("x").debug("detail")
    assert stream.getvalue() == ""
    configure(level="debug", stream=stream)
    get_log("x").debug("detail")
    assert lines(stream)[0]["level"] == "debug"


def test_a_librarys_message_is_wrapped_and_cut(stream: io.StringIO) -> None:
    logging.getLogger("asyncio").warning("slow %s", "x" * 5000)
    try:
        raise KeyError("k")
    except KeyError:
        logging.getLogger("asyncio").exception("went wrong")
    first, second = lines(stream)
    assert (first["event"], first["logger"], len(first["message"])) == ("library", "asyncio", 2000)
    assert (second["message"], second["error_type"]) == ("went wrong", "KeyError")


def test_a_log_that_nobody_reads_does_no_harm(capsys: pytest.CaptureFixture[str], stream: io.StringIO) -> None:
    stream.close()
    get_log("x").info("unheard")
    assert capsys.readouterr().err == ""


def test_constants_of_the_process_are_in_every_line_and_replace_nothing(stream: io.StringIO) -> None:
    bind(version="1", instance_id="i")
    bind(registry_digest="r")
    get_log("x").info("listening", version="2", port=1)
    logging.getLogger("asyncio").warning("slow")
    fact, library = lines(stream)
    assert (fact["version"], fact["instance_id"], fact["registry_digest"]) == ("2", "i", "r")
    assert (library["version"], library["instance_id"], library["registry_digest"]) == ("1", "i", "r")
    configure(stream=stream)
    get_log("x").info("later")
    assert "version" not in lines(stream)[-1]
