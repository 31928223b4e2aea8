"""Talking to a running server: one request, one JSON answer."""

from __future__ import annotations

import http.client
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import click

from protocol.errors import ConfigError
from supervisor import tokens

SERVER_VARIABLE = "CREW_SUPERVISOR_SERVER"
TOKEN_VARIABLE = "AIP_CREWAI_BEARER_TOKEN"
TOKEN_FILE_VARIABLE = "AIP_CREWAI_BEARER_TOKEN_FILE"
DEFAULT_SERVER = "http://127.0.0.1:8090"
TIMEOUT_S = 30.0

server_option = click.option(
    "--server", envvar=SERVER_VARIABLE, default=DEFAULT_SERVER, show_default=True, help=f"URL; else {SERVER_VARIABLE}."
)
token_option = click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    help=f"File with the token; else what {TOKEN_FILE_VARIABLE} or {TOKEN_VARIABLE} says.",
)


class Unreachable(Exception):
    """No answer that makes sense came from the server; the text says why."""


class Answer(NamedTuple):
    """A whole response; ``document`` is its parsed JSON."""

    status: int
    document: dict[str, Any]
    etag: str | None


class Server:
    """A server by its URL, and the token that it wants. Neither proxies nor redirects are followed."""

    def __init__(self, url: str, token_file: Path | None) -> None:
        """Raises click.UsageError."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/"):
            raise click.UsageError(f"--server {url!r} is no URL of a server; name one such as {DEFAULT_SERVER}")
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        try:
            self._connection = kind(parts.hostname, parts.port, timeout=TIMEOUT_S)
            self._token = _token(token_file)
        except (ValueError, ConfigError) as error:
            raise click.UsageError(str(error)) from None

    def ask(self, method: str, path: str, *, body: Any = None, headers: Mapping[str, str] | None = None) -> Answer:
        """Send one request and read its answer. Raises Unreachable."""
        sent = dict(headers or {})
        if self._token is not None:
            sent["Authorization"] = f"Bearer {self._token}"
        payload = None
        if body is not None:
            payload = json.dumps(body).encode("ascii")
            sent["Content-Type"] = "application/json"
        encoded = {name: value.encode("utf-8") for name, value in sent.items()}
        try:
            self._connection.request(method, path, body=payload, headers=encoded)
            response = self._connection.getresponse()
            data = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise Unreachable(f"{self._connection.host}:{self._connection.port} does not answer: {error}") from None
        finally:
            self._connection.close()
        try:
            document = json.loads(data)
        except ValueError:
            document = None
        if not isinstance(document, dict):
            raise Unreachable(f"{self._connection.host}:{self._connection.port} is no crew-supervisor")
        return Answer(response.status, document, response.getheader("ETag"))


def _token(token_file: Path | None) -> str | None:
    """Raises ConfigError."""
    path = token_file or os.environ.get(TOKEN_FILE_VARIABLE, "").strip()
    if path:
        return tokens.read_token_file(Path(path))
    text = os.environ.get(TOKEN_VARIABLE, "")
    return tokens.check_token(text, TOKEN_VARIABLE) if text.strip() else None
