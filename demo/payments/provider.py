"""A payment provider: a real HTTP server in a process of its own, with a durable ledger and faults on demand.

``python -m demo.payments.provider LEDGER [--idempotent]`` listens on loopback and prints its port.

* ``POST /charge`` ``{"invoice", "amount"}``, header ``Idempotency-Key``: one more line in the ledger. With
  ``--idempotent`` the same key gives the same charge and no second line, and 409 for another body.
* ``GET /charges``, ``GET /charges?key=``: what was charged.
* ``POST /fault`` ``{"fault": NAME, "times": N}``: what happens to the next N charges.
  ``lose_ack``: acts and closes the socket without an answer. ``fail``: answers 500 and does not act. ``delay``: acts
  and answers ``seconds`` later. ``hold``: acts, and answers after ``POST /release``.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

FAULTS = ("lose_ack", "fail", "delay", "hold")
#: How long a held answer waits, seconds; longer than any test.
HOLD_LIMIT_S = 120.0
TIMEOUT_S = 30.0
ROOT = Path(__file__).resolve().parents[2]


class Ledger:
    """The provider's own books: every line is on the disk before anybody hears of it."""

    def __init__(self, path: str) -> None:
        self._lock = threading.Lock()
        self._database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._database.execute("PRAGMA synchronous=FULL")
        self._database.execute(
            "CREATE TABLE IF NOT EXISTS charges "
            "(id INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT, invoice TEXT, amount REAL)"
        )

    def charge(self, key: str | None, body: dict[str, Any], *, idempotent: bool) -> tuple[int, dict[str, Any]]:
        """Take the money. Returns the HTTP status and the charge."""
        with self._lock:
            if idempotent and key is not None and (known := self._select("WHERE key = ?", key)):
                same = all(known[0][name] == body[name] for name in ("invoice", "amount"))
                return (200, known[0]) if same else (409, {"error": "the key was used with another body"})
            self._database.execute(
                "INSERT INTO charges (key, invoice, amount) VALUES (?, ?, ?)", (key, body["invoice"], body["amount"])
            )
            return 200, self._select("ORDER BY id DESC LIMIT 1")[0]

    def charges(self, key: str | None = None) -> list[dict[str, Any]]:
        """All lines, or those of one key, oldest first."""
        with self._lock:
            return self._select("ORDER BY id") if key is None else self._select("WHERE key = ? ORDER BY id", key)

    def _select(self, rest: str, *values: Any) -> list[dict[str, Any]]:
        names = ("id", "key", "invoice", "amount")
        rows = self._database.execute(f"SELECT {', '.join(names)} FROM charges {rest}", values)
        return [dict(zip(names, row, strict=True)) for row in rows]


class Server(ThreadingHTTPServer):
    """What all requests share."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, ledger: str, *, idempotent: bool) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.ledger = Ledger(ledger)
        self.idempotent = idempotent
        self.released = threading.Event()
        self._lock = threading.Lock()
        self._fault: dict[str, Any] = {}

    def set_fault(self, fault: dict[str, Any]) -> None:
        """What happens to the next charges."""
        self.released.clear()
        with self._lock:
            self._fault = fault

    def take_fault(self) -> dict[str, Any]:
        """What happens to this one."""
        with self._lock:
            if self._fault.get("times", 0) <= 0:
                return {}
            self._fault["times"] -= 1
            return self._fault


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: Server

    def log_message(self, format: str, *values: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        """Look something up."""
        address = urlsplit(self.path)
        key = parse_qs(address.query).get("key", [None])[0]
        self._answer(200, self.server.ledger.charges(key))

    def do_POST(self) -> None:
        """Charge, set a fault, or release what is held."""
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
        if self.path == "/fault":
            self.server.set_fault(body)
            self._answer(200, {})
        elif self.path == "/release":
            self.server.released.set()
            self._answer(200, {})
        else:
            self._charge(body)

    def _charge(self, body: dict[str, Any]) -> None:
        fault = self.server.take_fault()
        if fault.get("fault") == "fail":
            self._answer(500, {"error": "nothing was done"})
            return
        key = self.headers.get("Idempotency-Key")
        status, charge = self.server.ledger.charge(key, body, idempotent=self.server.idempotent)
        match fault.get("fault"):
            case "lose_ack":
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            case "delay":
                time.sleep(fault["seconds"])
            case "hold":
                self.server.released.wait(HOLD_LIMIT_S)
        self._answer(status, charge)

    def _answer(self, status: int, document: Any) -> None:
        data = json.dumps(document).encode()
        # Whoever asked may be dead.
        with contextlib.suppress(OSError):
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)


class Refused(Exception):
    """The provider says that it did not act."""


def charge(url: str, invoice: str, amount: float, *, key: str | None = None) -> dict[str, Any]:
    """Charge at ``url``. Raises Refused for an answer that says no, OSError where there is no answer."""
    request = urllib.request.Request(f"{url}/charge", json.dumps({"invoice": invoice, "amount": amount}).encode())
    request.add_header("Content-Type", "application/json")
    if key is not None:
        request.add_header("Idempotency-Key", key)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            made: dict[str, Any] = json.load(answer)
            return made
    except urllib.error.HTTPError as error:
        raise Refused(f"the provider answered {error.code}: {error.read().decode()}") from None


def look_up(url: str, key: str | None = None) -> list[dict[str, Any]]:
    """What was charged, in all or under ``key``. Raises OSError."""
    address = f"{url}/charges" if key is None else f"{url}/charges?key={key}"
    with urllib.request.urlopen(address, timeout=TIMEOUT_S) as answer:
        found: list[dict[str, Any]] = json.load(answer)
        return found


class Provider:
    """The process. ``start`` may be called again after ``kill``: its ledger is still there."""

    def __init__(self, ledger: Path, *, idempotent: bool = False) -> None:
        self._command = [sys.executable, "-m", "demo.payments.provider", str(ledger)]
        self._command += ["--idempotent"] if idempotent else []
        self._process: subprocess.Popen[str] | None = None
        self.url = ""

    def start(self) -> Provider:
        """Start it and wait until it listens."""
        self._process = subprocess.Popen(self._command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.url = f"http://127.0.0.1:{int(self._process.stdout.readline())}"
        return self

    def kill(self) -> None:
        """SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def fault(self, name: str, times: int = 1, **more: Any) -> None:
        """Do ``name`` to the next ``times`` charges."""
        self._post("/fault", {"fault": name, "times": times, **more})

    def release(self) -> None:
        """Answer what is held."""
        self._post("/release", {})

    def charges(self, key: str | None = None) -> list[dict[str, Any]]:
        """The provider's own count of effects."""
        return look_up(self.url, key)

    def _post(self, path: str, body: dict[str, Any]) -> None:
        request = urllib.request.Request(self.url + path, json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            answer.read()


def main(ledger: str, *, idempotent: bool) -> None:
    """Serve until killed."""
    server = Server(ledger, idempotent=idempotent)
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main(sys.argv[1], idempotent="--idempotent" in sys.argv[2:])
