"""Structured logging: an event name and fields, never interpolated text.

One JSON line per fact on stderr; under systemd one record with fields in its journal.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from supervisor import journald

Field = str | int | float | bool | Path | None | Sequence["Field"] | Mapping[str, "Field"]

#: Messages of libraries are cut here.
MAX_TEXT_CHARS = 2000


class Log:
    """Writes facts: ``log.info("listening", host=host, port=port)``. Fields never hold inputs, outputs or secrets."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def debug(self, event: str, **fields: Field) -> None:
        """A fact for whoever looks for a fault."""
        self._write(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: Field) -> None:
        """A fact of normal work."""
        self._write(logging.INFO, event, fields)

    def warning(self, event: str, **fields: Field) -> None:
        """A fact that an operator should look at."""
        self._write(logging.WARNING, event, fields)

    def error(self, event: str, **fields: Field) -> None:
        """A fact that needs an operator."""
        self._write(logging.ERROR, event, fields)

    def failure(self, event: str, error: BaseException, **fields: Field) -> None:
        """An exception that should not have happened: its class and the places it passed, without its text."""
        places: list[Field] = [
            f"{Path(frame.filename).name}:{frame.lineno} {frame.name}"
            for frame in traceback.extract_tb(error.__traceback__)[-20:]
        ]
        self._write(logging.ERROR, event, {**fields, "error_type": type(error).__name__, "places": places})

    def _write(self, level: int, event: str, fields: Mapping[str, Field]) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, event, extra={"fields": fields})


def get_log(name: str) -> Log:
    """Return the log of a module; pass ``__name__``."""
    return Log(logging.getLogger(name))


class JsonLines(logging.Formatter):
    """Formats our records as their fields, and those of libraries as event ``library`` with a ``message``.

    Each line has the ``constants`` of the process too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.constants: dict[str, Field] = {}

    def format(self, record: logging.LogRecord) -> str:
        """Return one line of ASCII JSON."""
        fields = getattr(record, "fields", None)
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        if fields is None:
            line |= {"event": "library", "message": record.getMessage()[:MAX_TEXT_CHARS]}
            if record.exc_info and record.exc_info[0] is not None:
                line["error_type"] = record.exc_info[0].__name__
        else:
            # The fixed names win, so that a field can never pass for the event.
            line = {**line, "event": record.msg, **{name: fields[name] for name in fields if name not in line}}
        line = {**line, **{name: self.constants[name] for name in self.constants if name not in line}}
        try:
            return json.dumps(line, default=str, allow_nan=False)
        except ValueError:
            return json.dumps({name: str(value) for name, value in line.items()})


def bind(**constants: Field) -> None:
    """Have every later line of this process say these: its version, its instance, its digests."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, JsonLines):
            handler.formatter.constants |= constants


def configure(*, level: str = "info", stream: TextIO | None = None, environ: Mapping[str, str] | None = None) -> None:
    """Send every record of this process from ``level`` up to ``stream`` (stderr).

    Replaces earlier handlers, and forgets what was bound.
    Where ``environ`` says that stderr is connected to systemd's journal, records go there in its own form.
    """
    # A log nobody reads any more (EPIPE, ENOSPC) must not take the supervisor down nor print tracebacks.
    logging.raiseExceptions = False
    native = stream is None and environ is not None and journald.is_connected(environ, sys.stderr)
    handler: logging.Handler = journald.Handler() if native else logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
