"""What a job's log says of exceptions: types and places, and texts only where the configuration allows them.

The text of an exception may quote inputs, prompts and outputs. What a crew prints by itself is its own affair.
"""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: CrewAI's loggers, and the directories of its packages: it also logs on the root logger.
CREWAI = "crewai"
MAX_PLACES = 30
_texts = False


def speak(*, texts: bool) -> None:
    """Decide, for the rest of this process, whether the texts of exceptions are said too."""
    global _texts
    _texts = texts
    if not texts:
        sys.excepthook = lambda kind, error, trace: say(error)
        threading.excepthook = lambda unhandled: say(unhandled.exc_value or unhandled.exc_type())
        sys.unraisablehook = lambda unhandled: say(unhandled.exc_value or unhandled.exc_type())
        logging.setLogRecordFactory(_record)


def say(error: BaseException) -> None:
    """Write what is said of an exception to stderr, which is the job's log."""
    print(text_of(error), file=sys.stderr)


def text_of(error: BaseException) -> str:
    """The traceback with the exception's text, or without any text but names of types, files and functions."""
    if _texts:
        return "".join(traceback.format_exception(error)).rstrip("\n")
    return "\n".join(_lines(error))


def _lines(error: BaseException) -> Iterator[str]:
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield f"{type(cause).__name__}, its text is left out (log_exceptions = false)"
        for frame in traceback.extract_tb(cause.__traceback__)[-MAX_PLACES:]:
            yield f"  at {Path(frame.filename).name}:{frame.lineno} {frame.name}"
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)


def _record(*arguments: Any, **named: Any) -> logging.LogRecord:
    """A log record whose traceback has no texts, and if CrewAI makes it, which quotes errors, no message either."""
    record = logging.LogRecord(*arguments, **named)
    if record.exc_info and record.exc_info[1] is not None:
        record.exc_text = text_of(record.exc_info[1])
    from_crewai = record.name.partition(".")[0] == CREWAI or CREWAI in Path(record.pathname).parts
    if from_crewai and record.levelno >= logging.WARNING:
        record.msg = f"said at {record.filename}:{record.lineno}, its text is left out (log_exceptions = false)"
        record.args = ()
    return record
