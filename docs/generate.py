"""Writes the documents that are made from tables: ``python -m docs.generate``."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import click

import supervisor
from protocol.errors import CrewError
from supervisor.cli import PROGRAM, cli
from supervisor.cli.exits import MEANINGS
from supervisor.doctor import CHECKS
from supervisor.http.declare import EVERYWHERE, UNROUTED, Route
from supervisor.http.routes import Routes
from supervisor.metrics.table import FLEET_METRICS, LABELS, METRICS, Kind, Metric

ERRORS = Path(__file__).with_name("errors.md")
METRICS_FILE = Path(__file__).with_name("metrics.md")
DOCTOR = Path(__file__).with_name("doctor.md")
CLI = Path(__file__).with_name("cli.md")

TOOL = "what a tool's caller gets: a `ToolFailure` with this code"
#: Codes that no HTTP answer has, and where they are met instead.
ELSEWHERE = {
    "artifact_refused": "the last event of a `train` job",
    "command_refused": "`crew-supervisor journal`",
    **{f"connector.crewai.{cause}": "`supervisor.client`" for cause in (
        "authentication", "cancelled_unconfirmed", "configuration_or_input", "execution_failed", "invalid_credential",
        "invalid_stream", "remote_rejected", "remote_temporary", "response_too_large", "transport",
    )},
    "config_invalid": "the log at the start, exit status 2",
    "effect_abandoned": TOOL,
    "effect_arguments_refused": TOOL,
    "effect_conflict": TOOL,
    "effect_in_flight": TOOL,
    "effect_ledger_unavailable": TOOL,
    "effect_outcome_unknown": TOOL,
    "effect_stale": "the audit, as `effect_refused`",
    "effect_stopping": TOOL,
    "illegal_transition": "the log",
    "launch_failed": "the log; the job fails and nothing was dispatched",
    "protocol_violation": "the log; the job fails",
    "start_refused": "the log at the start, exit status 3",
    "template_failed": "the log at the start (exit status 3) or at a reload",
}  # fmt: skip
#: The root's own code: a fault of the supervisor itself, which any route may have and none should.
FAULT = "internal"

HEAD = """# Errors

Made by `python -m docs.generate` from the classes of errors and the route table; a test compares.

Every error over HTTP is a problem document (RFC 9457, `application/problem+json`): `code` is stable, `detail` is for
people, `action_id` is there where one Action is meant, and `type` is `urn:crew-supervisor:error:` and the code.
*Again* says whether the same request may be sent again unchanged; `Retry-After` says when, if it is there.
Bytes that are no HTTP request get a plain-text 400 and a closed connection.
"""


def error_classes() -> list[type[CrewError]]:
    """Every class of errors that has a code of its own, by status and code."""
    for module in pkgutil.walk_packages(supervisor.__path__, "supervisor."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    named = [error for error in _below(CrewError) if "code" in vars(error)]
    return sorted(named, key=lambda error: (error.status, error.code))


def _below(root: type[CrewError]) -> Iterator[type[CrewError]]:
    yield root
    for child in root.__subclasses__():
        yield from _below(child)


def routes_of(error: type[CrewError]) -> list[Route]:
    """The rows of the route table that have the error."""
    return [route for route in Routes.table() if error in route.all_errors]


def errors_document() -> str:
    """Text of errors.md."""
    classes = error_classes()
    answered = [error for error in classes if error.code not in ELSEWHERE]
    lines = [HEAD, "## Over HTTP", "", "| status | code | what it means | again | where |", "|---|---|---|---|---|"]
    for error in answered:
        again = "yes" if error.retryable else "no"
        lines.append(f"| {error.status} | `{error.code}` | {_meaning(error)} | {again} | {_where(error)} |")
    lines += ["", "## Elsewhere", "", "| code | what it means | where |", "|---|---|---|"]
    for error in sorted(classes, key=lambda error: error.code):
        if error.code in ELSEWHERE:
            lines.append(f"| `{error.code}` | {_meaning(error)} | {ELSEWHERE[error.code]} |")
    return "\n".join(lines) + "\n"


def _meaning(error: type[CrewError]) -> str:
    text = "A fault of the supervisor itself; its log names the place." if error.code == FAULT else error.__doc__ or ""
    first = " ".join(text.split("\n\n")[0].split())
    return f"**{error.title}.** {first}".replace("|", "\\|").replace("``", "`")


def _where(error: type[CrewError]) -> str:
    rows = routes_of(error)
    if error.code == FAULT:
        return "any, and no request should meet it"
    if error in UNROUTED:
        return "no route"
    if error in EVERYWHERE:
        return "any"
    closed = [route for route in Routes.table() if not route.open]
    if rows == closed:
        return "any but the open ones"
    if rows == [route for route in closed if route.method != "GET"]:
        return "any but `GET`"
    return ", ".join(f"`{route.method} {route.path}`" for route in rows)


METRICS_HEAD = """# Metrics

Made by `python -m docs.generate` from `supervisor/metrics/table.py`; a test compares.

`GET /metrics` wants the token, a read-only one will do, and answers in Prometheus' text format or, where that is
accepted, in OpenMetrics. Counters begin at 0 with the process. A scrape reads memory and /proc and no disk. No label
has the id of an Action in it. Beside these there are the `process_*` metrics of the supervisor's own process (CPU,
memory, descriptors), as every Prometheus client has them.

[monitoring/](monitoring/) has a Grafana dashboard, alert rules and how to scrape.
"""


FLEET_HEAD = """Only a replica of a fleet ([fleet.md](fleet.md)) has these. `crew_supervisor_host_*` are the
reference host's metrics under our prefix."""


def metrics_document() -> str:
    """Text of metrics.md."""
    lines = [METRICS_HEAD, "| metric | kind | labels | what |", "|---|---|---|---|"]
    lines += [_metric_row(metric) for metric in METRICS]
    lines += ["", "## In a fleet", "", FLEET_HEAD, "", "| metric | kind | labels | what |", "|---|---|---|---|"]
    lines += [_metric_row(metric) for metric in FLEET_METRICS]
    lines += ["", "## Labels", "", "| label | values |", "|---|---|"]
    lines += [f"| `{name}` | {values} |" for name, values in LABELS.items()]
    return "\n".join(lines) + "\n"


def _metric_row(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    text = metric.help
    if metric.kind is Kind.HISTOGRAM:
        text += f" Buckets to {metric.buckets[-1]:g}{' s' if metric.unit == 'seconds' else ''}."
    return f"| `{metric.name}` | {metric.kind.value} | {labels} | {text} |"


DOCTOR_HEAD = """# Doctor

Made by `python -m docs.generate` from `supervisor/doctor/checks.py`; a test compares.

`crew-supervisor doctor [--config FILE] [--json]` looks for what would keep a supervisor from starting, or from keeping
its promises, on this machine. Each line is *ok*, *warning* or *failure*, with what to do about it. Exit status 0 if
there is no failure, 1 if there is one. With `--json` it prints one document,
`{"ok": true, "findings": [{"name": "...", "verdict": "ok", "detail": "...", "advice": ""}]}`.

Run it as the supervisor's user, in its environment and working directory: another user has other rights, and a shell's
cgroup is not the service's. Under systemd with our unit's settings:
`systemd-run --pipe --wait -p User=... -p Delegate=yes -p WorkingDirectory=... crew-supervisor doctor --config ...`.
Nothing is changed. A running supervisor is not disturbed, and is no failure. Where the configuration is refused, the
checks that need it are left out.
"""


def doctor_document() -> str:
    """Text of doctor.md."""
    lines = [DOCTOR_HEAD, "| check | what it looks at |", "|---|---|"]
    lines += [f"| `{check.name}` | {check.what} |" for check in CHECKS]
    return "\n".join(lines) + "\n"


CLI_HEAD = """# Command line

Made by `python -m docs.generate` from the commands themselves; a test compares.

Data goes to stdout and talk to stderr. `--json` prints one document, of a stream one a line; what went wrong is then
`{"ok": false, "error": {"code": ..., "detail": ...}}` on stdout, wrong usage apart. Colours are for terminals, and
`NO_COLOR` turns them off. `submit --follow` and `wait` show a line with task, agent, tool, tokens and time while they
wait, if stderr is a terminal and `--json` is not given.

    crew-supervisor submit yours --input '{"topic": "bees"}' --action-id letter-17 --follow
    crew-supervisor events letter-17 --follow --json | jq -r .event
    crew-supervisor cancel letter-17 --reason "no longer needed"

## Server and token

Commands that talk to a server look, in this order, for

* its URL: `--server`, `CREW_SUPERVISOR_SERVER`, `server` in the client file, `http://127.0.0.1:8090`;
* the token: `--token-file`, `AIP_CREWAI_BEARER_TOKEN_FILE`, `AIP_CREWAI_BEARER_TOKEN`, `token_file` or `token` in the
  client file. The client file's token is sent to the client file's server only;
* the client file: `--client-file`, `CREW_SUPERVISOR_CLIENT_FILE`, `$XDG_CONFIG_HOME/crew-supervisor/client.toml`, where
  `XDG_CONFIG_HOME` is `~/.config` unless set. It must be yours and closed to others (0600):

```toml
server = "https://crews.example"
token_file = "token"        # relative to this file; or token = "..."
```

Variables that are empty count as not set. `http` is for this machine only; elsewhere use `https`.

## Completion

    eval "$(_CREW_SUPERVISOR_COMPLETE=bash_source crew-supervisor)"             # ~/.bashrc
    eval "$(_CREW_SUPERVISOR_COMPLETE=zsh_source crew-supervisor)"              # ~/.zshrc
    _CREW_SUPERVISOR_COMPLETE=fish_source crew-supervisor | source              # ~/.config/fish/config.fish

## Exit statuses
"""
#: Parameters of every command that talks to a server.
TARGET_OPTIONS = frozenset({"server", "token_file", "client_file"})


def cli_document() -> str:
    """Text of cli.md."""
    lines = [CLI_HEAD, "| status | meaning |", "|---|---|"]
    lines += [f"| {status.value} | {meaning} |" for status, meaning in MEANINGS.items()]
    lines += ["", "`serve` has its own: 0 stopped, 1 work is left whose stop is not proved, 2 configuration refused, 3"]
    lines += ["start refused.", "", "## Commands"]
    for path, command in commands(cli, (PROGRAM,)):
        lines += ["", *_command_section(path, command)]
    return "\n".join(lines) + "\n"


def commands(command: click.Command, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command below ``command`` that is no group, with the words that lead to it."""
    if not isinstance(command, click.Group):
        yield path, command
        return
    for name in command.commands:
        yield from commands(command.commands[name], (*path, name))


def _command_section(path: tuple[str, ...], command: click.Command) -> Iterator[str]:
    context = click.Context(command, info_name=" ".join(path))
    yield f"### {' '.join(path[1:])}"
    yield ""
    yield f"    {' '.join((*path, *command.collect_usage_pieces(context)))}"
    yield ""
    yield from inspect.cleandoc(command.help or "").splitlines()
    options = [param for param in command.params if isinstance(param, click.Option)]
    own = [option for option in options if option.name not in TARGET_OPTIONS]
    if own:
        yield from ("", "| option | |", "|---|---|")
    for option in own:
        names, text = option.get_help_record(context) or ("", "")
        yield f"| `{_cell(names)}` | {_cell(text)} |"
    if len(own) < len(options):
        yield from ("", "And `--server`, `--token-file`, `--client-file`.")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    CLI.write_text(cli_document(), encoding="utf-8")
    DOCTOR.write_text(doctor_document(), encoding="utf-8")
    ERRORS.write_text(errors_document(), encoding="utf-8")
    METRICS_FILE.write_text(metrics_document(), encoding="utf-8")
