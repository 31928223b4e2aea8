"""Commands that talk to no server: their documents are of their schemas, their refusals of the common one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

from docs import generate
from supervisor.cli import cli
from supervisor.doctor import Report
from supervisor.journal.checking import CheckReport
from supervisor.journal.importing import ImportReport
from tests.cli.test_commands import COMMANDS, code_of, name_of
from tests.cli.test_exits import takes
from tests.support.reference import record
from tests.support.registries import GOOD, write_registry
from tests.unit.test_cli import run


class Settings(msgspec.Struct, forbid_unknown_fields=True):
    """What ``config check`` prints."""

    ok: bool
    digest: str
    settings: dict[str, Any]


def more(kind: type[msgspec.Struct], **fields: Any) -> type[msgspec.Struct]:
    """A report as it is printed: with fields before its own; every field, and no other."""
    own = [(field.name, field.type) for field in msgspec.structs.fields(kind)]
    return msgspec.defstruct(kind.__name__, [*fields.items(), *own], forbid_unknown_fields=True)


#: Command, its exit status on ``place``, what it prints there, and what it refuses.
LOCAL: dict[tuple[str, ...], tuple[tuple[str, ...], type[msgspec.Struct], tuple[str, ...] | None]] = {
    ("config", "check"): (("--config", "PLACE/good.toml"), Settings, ("--config", "PLACE/none.toml")),
    ("doctor",): (("--config", "PLACE/good.toml"), more(Report), None),
    ("journal", "import"): (
        ("PLACE/runs.json", "--into", "PLACE/new/journal.db"),
        more(ImportReport, ok=bool),
        ("PLACE/none.json", "--into", "PLACE/newer/journal.db"),
    ),
    ("journal", "check"): (
        ("PLACE/imported/journal.db",),
        more(CheckReport, ok=bool, journal=str),
        ("PLACE/none.db",),
    ),
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Files for the commands: a configuration, a runs.json, and a journal that one was made of."""
    registry = write_registry(tmp_path, GOOD)
    good = tmp_path / "good.toml"
    good.touch(mode=0o600)
    good.write_text(
        'registry = "my_registry:CREWS"\nstate_file = "state/j.db"\nbearer_token = "a-token-of-a-test-that-is-long"\n'
        'host = "127.0.0.1"\nport = 0\n[template]\npreload = []\n'
    )
    for name in ("runs.json", "other.json"):
        (tmp_path / name).touch(mode=0o600)
        (tmp_path / name).write_text(json.dumps([record("a")]))
    assert registry.exists()
    done = run("journal", "import", str(tmp_path / "other.json"), "--into", str(tmp_path / "imported" / "journal.db"))
    assert done.returncode == 0, done.stderr
    return tmp_path


def command(words: tuple[str, ...], place: Path) -> Any:
    """Run a command with --json."""
    words = tuple(word.replace("PLACE", str(place)) for word in words)
    return run(*words, "--json", PYTHONPATH=f"{generate.ERRORS.parents[1]}:{place / 'registry'}")


@pytest.mark.parametrize("name", LOCAL, ids=" ".join)
def test_a_document_is_of_its_schema(place: Path, name: tuple[str, ...]) -> None:
    arguments, kind, _ = LOCAL[name]
    done = command((*name, *arguments), place)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(done.stdout)
    schema = msgspec.json.schema(kind, schema_hook=lambda unknown: {"type": "string"})
    jsonschema.validate(document, schema)
    assert document["ok"] is True
    for wrong in ({**document, "another": 1}, {key: document[key] for key in list(document)[1:]}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)


@pytest.mark.parametrize("name", [name for name, row in LOCAL.items() if row[2]], ids=" ".join)
def test_a_refusal_is_of_the_common_schema(place: Path, name: tuple[str, ...]) -> None:
    refused = LOCAL[name][2]
    assert refused is not None
    done = command((*name, *refused), place)
    assert done.returncode in (1, 2)
    assert code_of(done)


def test_every_command_with_json_is_in_one_of_the_two_lists() -> None:
    found = {path[1:] for path, one in generate.commands(cli, ("crew-supervisor",)) if takes(one, "as_json")}
    talking = set(map(name_of, COMMANDS))
    assert found == talking | LOCAL.keys()


@pytest.mark.parametrize(
    "words", [("install-units", "--directory", "PLACE/none"), ("journal", "backup", "PLACE/none.db", "PLACE/copy.db"),
              ("journal", "export", "PLACE/none.db"), ("serve", "--config", "PLACE/none.toml")],
    ids=lambda words: " ".join(words[:2]),
)  # fmt: skip
def test_the_others_refuse_with_a_status_and_a_word(place: Path, words: tuple[str, ...]) -> None:
    done = run(*(word.replace("PLACE", str(place)) for word in words))
    assert done.returncode == (2 if words[0] == "serve" else 1), done.stderr
    assert "none" in done.stderr
    assert "Traceback" not in done.stderr
