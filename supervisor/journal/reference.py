"""The reference server's journal, a runs.json: one JSON array of records (wire contract, section 14).

What the reference accepts at its start is accepted here, and what it refuses is refused; nothing is ever guessed.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from protocol import canonical
from protocol.errors import StartError
from protocol.operations import CONTROL_OPERATIONS, Operation
from protocol.states import Status
from supervisor.journal.records import Item

#: The reference's own default bound of the file.
LIMIT_BYTES = 268_435_456
#: Name of a stored event that stands for one without a usable name; its data has the whole original.
ODD_EVENT = "imported"

_OPERATIONS = frozenset(operation.value for operation in Operation) | CONTROL_OPERATIONS
_REQUIRED = ("action_id", "crew_id", "input_hash", "status")
_SPACE = re.compile(r"[ \t\n\r]*")
#: A name that can stand on an SSE line.
_EVENT_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
_HEAD_BYTES = 4096


class Change(msgspec.Struct, frozen=True):
    """What could not be kept as it was in one record. ``what`` is one of the words below."""

    action_id: str
    what: str


#: NaN and infinities are not JSON.
NULLED = "non_finite_number_became_null"
#: Text that is not well-formed Unicode got U+FFFD.
REPLACED = "lone_surrogate_replaced"
#: The position is the sequence.
RENUMBERED = "event_renumbered"
#: See ODD_EVENT.
WRAPPED = "event_wrapped"


class ReferenceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One record. Event data and ``output`` are ASCII JSON; an event's sequence is its position."""

    action_id: str
    crew_id: str
    operation: str
    request_hash: str
    status: Status
    events: tuple[Item, ...]
    output: bytes
    #: What could not be kept, in the words above.
    changes: tuple[str, ...] = ()


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """A runs.json as it was read. ``owner``: its uid. ``written_at``: its modification time, Unix seconds."""

    path: Path
    text: str
    owner: int
    written_at: float


def is_reference(path: Path) -> bool:
    """Whether a regular file at ``path`` begins like a runs.json; nothing else about it is checked."""
    try:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            return False
        with open(path, "rb") as file:
            return file.read(_HEAD_BYTES).lstrip().startswith(b"[")
    except FileNotFoundError:
        return False


def read(path: Path, *, limit_bytes: int = LIMIT_BYTES) -> Source:
    """Read the file under the reference's own rules: regular, private, bounded, the one that was examined.

    Raises StartError.
    """
    try:
        found = os.lstat(path)
        _check_file(path, found, limit_bytes)
        with open(path, "rb", opener=_open_plain) as file:
            opened = os.fstat(file.fileno())
            if (opened.st_dev, opened.st_ino) != (found.st_dev, found.st_ino):
                _refuse(path, "it was replaced while it was opened")
            body = file.read(limit_bytes + 1)
    except OSError as error:
        raise StartError(f"{path} cannot be imported: {error.strerror}") from None
    if len(body) > limit_bytes:
        _refuse(path, f"it has more than {limit_bytes} bytes; raise max_state_bytes (AIP_CREWAI_MAX_STATE_BYTES)")
    try:
        return Source(path=path, text=body.decode("utf-8"), owner=found.st_uid, written_at=found.st_mtime)
    except UnicodeDecodeError as error:
        _refuse(path, f"it is not UTF-8 at byte {error.start}")


def _open_plain(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def _check_file(path: Path, found: os.stat_result, limit_bytes: int) -> None:
    mode = stat.S_IMODE(found.st_mode)
    if not stat.S_ISREG(found.st_mode):
        _refuse(path, "it is a symlink or no regular file")
    if mode & 0o077:
        _refuse(path, f"it has mode {mode:04o}; it must be 0600, chmod it after a look at who changed it")
    if found.st_size > limit_bytes:
        bound = f"the bound is {limit_bytes}; raise max_state_bytes (AIP_CREWAI_MAX_STATE_BYTES)"
        _refuse(path, f"it has {found.st_size} bytes, {bound}")


def _refuse(path: Path, why: str) -> NoReturn:
    raise StartError(f"{path} cannot be imported: {why}; nothing was imported and the file is as it was")


def records(source: Source) -> Iterator[ReferenceRecord]:
    """Yield the records in their order, one in memory at a time. Raises StartError, naming the one at fault."""
    decoder = _Decoder()
    seen: set[str] = set()
    try:
        for value in _elements(source.text, decoder):
            record = _record(value, nulled=decoder.take_nulled())
            if record.action_id in seen:
                raise _Broken(f"has the Action id {record.action_id!r} of an earlier one")
            seen.add(record.action_id)
            yield record
    except _Broken as error:
        _refuse(source.path, f"record {len(seen)} {error}")
    except json.JSONDecodeError as error:
        _refuse(source.path, f"{error.msg} at line {error.lineno} column {error.colno} (character {error.pos})")
    except RecursionError:
        _refuse(source.path, f"record {len(seen)} is nested too deeply")
    except ValueError:
        _refuse(source.path, f"record {len(seen)} has an integer of more digits than can be read")


class _Broken(Exception):
    """A record breaks a rule; the text goes on after "record N"."""


class _Decoder:
    """Decodes one value after another as the reference does, but numbers that are not finite become None."""

    def __init__(self) -> None:
        self._nulled = False
        self.decode = json.JSONDecoder(parse_constant=self._null, parse_float=self._finite).raw_decode

    def _null(self, text: str) -> None:
        self._nulled = True

    def _finite(self, text: str) -> float | None:
        value = float(text)
        if math.isinf(value):
            self._nulled = True
            return None
        return value

    def take_nulled(self) -> bool:
        """Whether a number became None since the last call."""
        nulled, self._nulled = self._nulled, False
        return nulled


def _elements(text: str, decoder: _Decoder) -> Iterator[Any]:
    at = _skip(text, 0)
    if text[at : at + 1] != "[":
        raise json.JSONDecodeError("Not a JSON array", text, at)
    at = _skip(text, at + 1)
    more = text[at : at + 1] != "]"
    while more:
        value, at = decoder.decode(text, at)
        yield value
        at = _skip(text, at)
        more = text[at : at + 1] == ","
        if not more and text[at : at + 1] != "]":
            raise json.JSONDecodeError("Expecting ',' or ']'", text, at)
        at = _skip(text, at + 1) if more else at
    if _skip(text, at + 1) != len(text):
        raise json.JSONDecodeError("Extra data after the array", text, at + 1)


def _skip(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


def _record(value: Any, *, nulled: bool) -> ReferenceRecord:
    if not isinstance(value, dict):
        raise _Broken("is no object")
    who = f"(Action {str(value['action_id'])[:256]!r}) " if "action_id" in value else ""
    missing = [name for name in _REQUIRED if name not in value]
    if missing:
        raise _Broken(f"{who}lacks {', '.join(missing)}")
    for name in _REQUIRED:
        _check_text(who, name, value[name])
    operation, status = value.get("operation", Operation.RUN.value), value["status"]
    if not isinstance(operation, str) or operation not in _OPERATIONS:
        raise _Broken(f"{who}has the unknown operation {str(operation)[:64]!r}")
    if status not in set(Status):
        raise _Broken(f"{who}has the unknown status {status[:64]!r}")
    events = value.get("events", [])
    if not isinstance(events, list):
        raise _Broken(f"{who}has events that are no array")
    changes = {NULLED} if nulled else set()
    return ReferenceRecord(
        action_id=value["action_id"],
        crew_id=value["crew_id"],
        operation=operation,
        request_hash=value["input_hash"],
        status=Status(status),
        events=tuple(_event(event, index, changes) for index, event in enumerate(events)),
        output=_json(value.get("output"), changes),
        changes=tuple(sorted(changes)),
    )


def _check_text(who: str, name: str, text: Any) -> None:
    if not isinstance(text, str) or not text:
        raise _Broken(f"{who}has a {name} that is no text, or empty")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise _Broken(f"{who}has a {name} that is not well-formed Unicode") from None


def _event(event: Any, index: int, changes: set[str]) -> Item:
    name = event.get("event") if isinstance(event, dict) else None
    if not isinstance(name, str) or not _EVENT_NAME.fullmatch(name):
        changes.add(WRAPPED)
        return ODD_EVENT, _json({"event": event}, changes)
    if event.get("sequence", index) != index:
        changes.add(RENUMBERED)
    return name, _json(event.get("data"), changes)


def _json(value: Any, changes: set[str]) -> bytes:
    data = canonical.compact(value)
    if b"\\ud" not in data:
        return data
    text = json.dumps(value, ensure_ascii=False)
    whole = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if whole == text:
        return data
    changes.add(REPLACED)
    return canonical.compact(json.loads(whole))
