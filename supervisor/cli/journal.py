"""``crew-supervisor journal``: import, export, check, backup. Only ``import`` takes the journal's lock."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import msgspec

from protocol.errors import ConfigError, CrewError
from supervisor import config
from supervisor.cli.exits import Exit
from supervisor.cli.shared import config_option, say_refusal
from supervisor.config.table import CONFIG_VARIABLE
from supervisor.journal.backup import back_up
from supervisor.journal.checking import CheckReport, check_journal
from supervisor.journal.exporting import ExportReport, Format, export, export_to
from supervisor.journal.files import JournalOwned
from supervisor.journal.importing import ImportReport, import_file
from supervisor.journal.reference import LIMIT_BYTES

#: Names of one kind that a line of text has.
NAMED = 10

_json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
_path = click.Path(path_type=Path)


@click.group("journal")
def journal_group() -> None:
    """Import, export, check and copy the journal.

    STATE_FILE is the journal; without it, the state_file of the configuration. Exit status: 0 done, 1 failed or
    something found, 2 wrong usage, 4 another process owns the journal.
    """


@contextlib.contextmanager
def _refusals(what: str, *, as_json: bool = False) -> Iterator[None]:
    try:
        yield
    except CrewError as error:
        say_refusal(what, error, as_json=as_json)
        statuses = {ConfigError: Exit.USAGE, JournalOwned: Exit.CONFLICT}
        sys.exit(statuses.get(type(error), Exit.FAILED))


def _settings(config_path: Path | None, state_file: Path | None) -> config.Settings | None:
    """The configuration, only where it is needed or asked for. Raises ConfigError, click.UsageError."""
    if state_file is not None and config_path is None:
        return None
    try:
        return config.load(config_path, os.environ)
    except ConfigError as error:
        if config_path is None and not os.environ.get(CONFIG_VARIABLE):
            raise click.UsageError("name a STATE_FILE, or a configuration with --config") from error
        raise


def _journal(config_path: Path | None, state_file: Path | None) -> Path:
    settings = _settings(config_path, state_file)
    if state_file is None and settings is not None:
        state_file = settings.state_file
    if state_file is None:
        raise click.UsageError("the configuration has no state_file; name a STATE_FILE")
    return state_file


@journal_group.command("import")
@click.argument("source", type=_path)
@click.option("--into", "target", metavar="STATE_FILE", type=_path, help="The new journal; SOURCE itself for in place.")
@click.option("--max-bytes", type=click.IntRange(1), help="Largest SOURCE; else max_state_bytes.")
@config_option
@_json_option
def import_command(
    source: Path, target: Path | None, max_bytes: int | None, config_path: Path | None, as_json: bool
) -> None:
    """Make a journal of SOURCE, a runs.json of the reference server.

    SOURCE is left as it is; in place it is kept as SOURCE.reference. A server does the same at its start with a
    runs.json that it finds at its state_file.
    """
    with _refusals("import refused", as_json=as_json):
        settings = _settings(config_path, target)
        into = _journal(config_path, target)
        limit_bytes = max_bytes or (settings.max_state_bytes if settings else LIMIT_BYTES)
        report = import_file(source, into, limit_bytes=limit_bytes)
    if as_json:
        click.echo(_pretty({"ok": True, **msgspec.to_builtins(report, enc_hook=str)}))
    else:
        _say_import(report, into)


def _say_import(report: ImportReport, into: Path) -> None:
    click.echo(f"{into}: {report.jobs} jobs and {report.events} events imported; the original is {report.kept_as}")
    if report.interrupted:
        click.echo(f"were running, now failed with an uncertain outcome: {_named(report.interrupted)}")
    for what in sorted({change.what for change in report.changes}):
        click.echo(f"{what}: {_named([change.action_id for change in report.changes if change.what == what])}")


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


@journal_group.command("export")
@click.argument("state_file", type=_path, required=False)
@click.option(
    "--format",
    "kind",
    type=click.Choice([kind.value for kind in Format]),
    default=Format.JSON.value,
    show_default=True,
    help="json: one object a line and job; reference: a runs.json.",
)
@click.option("--output", type=click.Path(path_type=Path), default="-", help="A file, or - for stdout.")
@config_option
def export_command(state_file: Path | None, kind: str, output: Path, config_path: Path | None) -> None:
    """Write every job that the journal retains, with its events.

    A file appears whole, with mode 0600, or not at all.
    """
    with _refusals("export failed"):
        path = _journal(config_path, state_file)
        report = _to_stdout(path, Format(kind)) if str(output) == "-" else export_to(path, Format(kind), output)
    _say_export(report, Format(kind))


def _to_stdout(path: Path, kind: Format) -> ExportReport:
    # A reader that stalls must not hold the journal's read transaction open, or a live one's log would grow.
    with tempfile.TemporaryFile() as spool:
        report = export(path, kind, spool.write)
        spool.seek(0)
        shutil.copyfileobj(spool, sys.stdout.buffer)
        sys.stdout.buffer.flush()
    return report


def _say_export(report: ExportReport, kind: Format) -> None:
    lines = [f"{report.jobs} jobs and {report.events} events exported"]
    if report.running:
        lines.append(f"still running: {_named(report.running)}")
    if report.quarantined:
        lines.append(f"could not be read (see `journal check`): {_named(report.quarantined)}")
    if report.archived:
        freed = "; the reference would execute them again" if kind is Format.REFERENCE else ""
        lines.append(f"{report.archived} archived Action ids are not in it{freed}")
    lines += [f"the reference needs {name}={value} or more to read it" for name, value in report.settings.items()]
    for line in lines:
        click.echo(line, err=True)


@journal_group.command("check")
@click.argument("state_file", type=_path, required=False)
@config_option
@_json_option
def check_command(state_file: Path | None, config_path: Path | None, as_json: bool) -> None:
    """Check the file's structure and that its tables agree; exit status 1 if something was found."""
    with _refusals("check failed", as_json=as_json):
        path = _journal(config_path, state_file)
        report = check_journal(path)
    if as_json:
        click.echo(_pretty({"ok": not report.findings, "journal": str(path), **msgspec.to_builtins(report)}))
    else:
        _say_check(report, path)
    sys.exit(Exit.FAILED if report.findings else Exit.OK)


def _say_check(report: CheckReport, path: Path) -> None:
    for finding in report.findings:
        where = f" row {finding.row}" if finding.row is not None else ""
        who = f" (Action {finding.action_id})" if finding.action_id is not None else ""
        click.echo(f"{finding.code}{where}{who}: {finding.detail}")
    verdict = f"{len(report.findings)} findings" if report.findings else "sound"
    held = f"{report.jobs} jobs, {report.events} events, {report.effects} effects, {report.tombstones} tombstones"
    click.echo(f"{path}: {verdict} ({held})")


@journal_group.command("backup")
@click.argument("paths", nargs=-1, type=_path, metavar="[STATE_FILE] DEST")
@config_option
def backup_command(paths: tuple[Path, ...], config_path: Path | None) -> None:
    """Copy the journal to the new file DEST, also while a server writes to it."""
    if not 1 <= len(paths) <= 2:
        raise click.UsageError("name [STATE_FILE] DEST")
    with _refusals("backup failed"):
        path = _journal(config_path, paths[0] if len(paths) > 1 else None)
        size_bytes = back_up(path, paths[-1])
    click.echo(f"{paths[-1]}: copy of {path}, {size_bytes} bytes")


def _pretty(document: object) -> str:
    return json.dumps(document, indent=2)
