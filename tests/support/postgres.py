"""A real PostgreSQL of its own: data directory, port and superuser made for the tests, and gone after them."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psycopg

#: Where Debian puts the programs; the newest version is taken.
DEBIAN = Path("/usr/lib/postgresql")
PASSWORD = "the-password-of-the-tests"
#: It refuses root, so it runs as the package's user, or as nobody.
USERS = ("postgres", "nobody")
START_DEADLINE_S = 60.0


def program(name: str) -> str:
    """Path of one of PostgreSQL's programs."""
    found = sorted(DEBIAN.glob(f"*/bin/{name}"), key=lambda path: int(path.parts[-3]))
    return str(found[-1]) if found else shutil.which(name) or name


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


class Postgres:
    """One server. ``restart`` kills it as a power cut would and starts it on the same data."""

    def __init__(self, *, addresses: tuple[str, ...] = ("127.0.0.1",), settings: tuple[str, ...] = ()) -> None:
        self.port = free_port()
        self._addresses = addresses
        self._settings = settings
        self._databases = itertools.count()

    def __enter__(self) -> Self:
        self.directory = Path(tempfile.mkdtemp(prefix="crew-tests-postgres-"))
        self._user = _user()
        if self._user is not None:
            shutil.chown(self.directory, self._user)
        password = self.directory / "password"
        password.write_text(PASSWORD, encoding="ascii")
        data = self.directory / "data"
        self._run("initdb", "-D", str(data), "-U", "crew", f"--pwfile={password}", "-A", "scram-sha-256", "-E", "UTF8",
                  "--no-sync")  # fmt: skip
        with (data / "pg_hba.conf").open("a", encoding="ascii") as rules:
            rules.write("host all crew 0.0.0.0/0 scram-sha-256\n")
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop(signal.SIGQUIT)
        shutil.rmtree(self.directory, ignore_errors=True)

    def _run(self, name: str, *arguments: str) -> None:
        done = subprocess.run(
            [program(name), *arguments], user=self._user, extra_groups=[] if self._user else None, cwd=self.directory,
            capture_output=True, text=True, timeout=120, check=False, env={"PATH": os.environ["PATH"], "LC_ALL": "C"},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr

    def start(self) -> None:
        """Start it and wait until it answers."""
        options = {
            "listen_addresses": ",".join(self._addresses), "port": self.port, "unix_socket_directories": "",
            "max_connections": 200, "log_min_messages": "warning",
            # After a kill the recovery syncs every file; one call does that for all of them.
            "recovery_init_sync_method": "syncfs",
        }  # fmt: skip
        arguments = [f"-c{name}={value}" for name, value in options.items()]
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [program("postgres"), "-D", str(self.directory / "data"), *arguments, *self._settings],
                user=self._user, extra_groups=[] if self._user else None, cwd=self.directory,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        give_up = time.monotonic() + START_DEADLINE_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > give_up:
                raise AssertionError((self.directory / "log").read_text(encoding="utf-8", errors="replace"))
            time.sleep(0.05)

    def _answers(self) -> bool:
        try:
            psycopg.connect(self.dsn("postgres"), connect_timeout=5).close()
        except psycopg.OperationalError:
            return False
        return True

    def stop(self, number: signal.Signals = signal.SIGINT) -> None:
        """SIGINT ends every session and shuts down in order; SIGQUIT leaves the rest to the recovery."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)
        self._process.wait(START_DEADLINE_S)

    def restart(self, number: signal.Signals = signal.SIGQUIT) -> None:
        """Stop it without mercy and start it again."""
        self.stop(number)
        self.start()

    def dsn(self, database: str, *, host: str = "127.0.0.1", port: int | None = None) -> str:
        """A connection URI with the password."""
        return f"postgresql://crew:{PASSWORD}@{host}:{port or self.port}/{database}"

    def create(self) -> str:
        """Make an empty database and return its name."""
        name = f"fleet{next(self._databases)}"
        with psycopg.connect(self.dsn("postgres"), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}".encode())
        return name

    def ask(self, database: str, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """Rows of a statement, [] for one without."""
        with psycopg.connect(self.dsn(database), autocommit=True) as connection:
            cursor = connection.execute(statement.encode(), values or None)
            return cursor.fetchall() if cursor.description else []


def _user() -> str | None:
    """Whose process it is to be; None: ours."""
    if os.geteuid() != 0:
        return None
    known = Path("/etc/passwd").read_text(encoding="utf-8")
    return next(user for user in USERS if f"\n{user}:" in f"\n{known}")
