"""Talking to a running server: its client opened for one piece of work, and what goes wrong as an exit status."""

from __future__ import annotations

import asyncio
import functools
import os
import sys
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, TypeVar

import click

from protocol.errors import ConfigError
from supervisor.cli.exits import Exit, of_failure
from supervisor.cli.shared import print_json, print_line, refusal, say_problem
from supervisor.cli.target import Target, client_file_option, find_target, server_option, token_option
from supervisor.client import Client, ClientFailure

T = TypeVar("T")
Work = Callable[[Client], Awaitable[T]]

json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON: one document, or of a stream one a line."
)


class Caller:
    """What a command that talks to a server is given: the server, and whether it answers in JSON."""

    def __init__(self, target: Target, *, as_json: bool) -> None:
        self._target = target
        self.as_json = as_json
        #: Documents are printed one a line: a failure is one more.
        self.in_lines = False

    def ask(self, work: Work[T]) -> T:
        """Do ``work`` with an open client. Any failure ends the command with the exit status of its kind."""
        try:
            return asyncio.run(self._open(work))
        except ClientFailure as failure:
            code = failure.refusal.code if failure.refusal is not None and failure.refusal.code else failure.code
            self.fail(of_failure(failure), code, failure.detail)
        except KeyboardInterrupt:
            sys.exit(Exit.INTERRUPTED)

    async def _open(self, work: Work[T]) -> T:
        async with Client(self._target.url, token=self._target.token) as client:
            return await work(client)

    def fail(self, status: Exit, code: str, detail: str) -> NoReturn:
        """End the command: one line on stderr, or a JSON document on stdout."""
        if not self.as_json:
            say_problem(status.word, detail)
        elif self.in_lines:
            print_line(refusal(code, detail))
        else:
            print_json(refusal(code, detail))
        sys.exit(status)


def calling(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options that name a server, and ``--json``; it gets a Caller as its first argument."""

    @server_option
    @token_option
    @client_file_option
    @json_option
    @functools.wraps(command)
    def wrapped(server: Any, token_file: Any, client_file: Any, as_json: bool, **arguments: Any) -> None:
        try:
            target = find_target(server, token_file, client_file, os.environ)
        except ConfigError as error:
            raise click.UsageError(error.detail) from None
        command(Caller(target, as_json=as_json), **arguments)

    return wrapped
