"""Connections to the fleet's database: few, each for one purpose, and none trusted after a failure.

The seam for everything that is shared: a ``Line`` to talk through, ``FENCE`` in every statement that writes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Awaitable, Callable
from typing import LiteralString, TypeVar

import psycopg
from psycopg import AsyncConnection

from protocol.errors import FleetUnavailable
from supervisor.fleet import schema
from supervisor.log import get_log

T = TypeVar("T")
#: Runs statements on a connection in autocommit; it is called again with another connection if the first is lost.
Work = Callable[[AsyncConnection], Awaitable[T]]

log = get_log(__name__)
#: Nobody waits longer for the database than this, seconds; nor longer than a third of the lease.
PATIENCE_S = 5.0
#: After a failure callers are refused at once for this long, seconds: they must not queue up for a dead connection.
COOLING_S = 0.25
RETRY_AFTER_S = 5

#: A common table expression that has one row as long as the replica's epoch is the newest and its lease is valid, and
#: that keeps it so until the transaction ends: FOR KEY SHARE lets heartbeats pass, while a registration and a
#: retirement lock the row FOR UPDATE, wait for it, and are waited for. Parameters: replica_id, epoch.
FENCE: LiteralString = """fence AS (
    SELECT replica_id, epoch FROM crew_supervisor.replicas
    WHERE replica_id = %(replica)s AND epoch = %(epoch)s AND retired_at IS NULL AND expires_at > clock_timestamp()
    FOR KEY SHARE)"""


def patience_s(lease_s: float) -> float:
    """How long an answer is waited for."""
    return min(PATIENCE_S, lease_s / 3)


class Line:
    """One connection, made when it is needed and thrown away when anything is wrong with it; one user at a time.

    ``work`` must be such that doing it twice is doing it once: where an answer was lost, it is done again.
    """

    def __init__(self, dsn: str, name: str, *, patience_s: float) -> None:
        self._dsn = dsn
        self._name = name
        self._patience_s = patience_s
        self._turn = asyncio.Lock()
        self._connection: AsyncConnection | None = None
        self._refused_until = 0.0
        self._abandoned: set[asyncio.Task[object]] = set()
        self._abandonments = 0
        self._has_tables = False

    async def run(self, work: Work[T]) -> T:
        """Do ``work`` and return what it returns. Raises FleetUnavailable: whether anything was done is not known."""
        self._refuse_if_cooling()
        async with self._turn:
            self._refuse_if_cooling()
            task = asyncio.ensure_future(self._perform(work))
            try:
                await asyncio.wait({task}, timeout=self._patience_s)
                if task.done():
                    return task.result()
            except asyncio.CancelledError:
                self._abandon(task)
                raise
            except FleetUnavailable:
                self._refused_until = time.monotonic() + COOLING_S
                raise
            self._abandon(task)
            self._refused_until = time.monotonic() + COOLING_S
            raise _away(f"it did not answer within {self._patience_s:g} s")

    def _refuse_if_cooling(self) -> None:
        if time.monotonic() < self._refused_until:
            raise _away("it did not answer a moment ago")

    async def _perform(self, work: Work[T]) -> T:
        abandonments = self._abandonments
        connection = self._connection
        try:
            if connection is not None:
                with contextlib.suppress(psycopg.OperationalError, psycopg.InterfaceError):
                    return await self._attempt(work, connection)
                # It was cut long ago, or just now and the answer with it: ask again, if anybody still waits.
                if abandonments != self._abandonments:
                    raise _away("its answer came too late")
            connection = self._connection = await self._connect()
            await self._attempt(self._set_up, connection)
            return await self._attempt(work, connection)
        except (psycopg.OperationalError, psycopg.InterfaceError) as error:
            raise _away(_why(error)) from None
        except psycopg.Error as error:
            raise _refused(error) from None

    async def _attempt(self, work: Work[T], connection: AsyncConnection) -> T:
        try:
            return await work(connection)
        except (psycopg.Error, FleetUnavailable):
            if self._connection is connection:
                self._connection = None
            with contextlib.suppress(psycopg.Error):
                await connection.close()
            raise

    async def _connect(self) -> AsyncConnection:
        return await AsyncConnection.connect(
            self._dsn,
            autocommit=True,
            application_name=f"crew-supervisor {self._name}",
            connect_timeout=max(2, int(self._patience_s)),
            target_session_attrs="read-write",
            keepalives_idle=5,
            keepalives_interval=2,
            keepalives_count=3,
            tcp_user_timeout=10_000,
        )

    async def _set_up(self, connection: AsyncConnection) -> None:
        """No statement outlives our patience by much, no commit is answered before it is durable."""
        limit_ms = str(int(self._patience_s * 1000))
        await connection.execute(
            """SELECT set_config('statement_timeout', %s, false), set_config('lock_timeout', %s, false),
                      set_config('idle_in_transaction_session_timeout', %s, false),
                      set_config('synchronous_commit', CASE WHEN current_setting('synchronous_commit')
                          IN ('off', 'local', 'remote_write') THEN 'on' ELSE current_setting('synchronous_commit') END,
                          false)""",
            (limit_ms, limit_ms, limit_ms),
        )
        # Once: a newer version may bring the tables forward while we run, and we go on with them.
        if not self._has_tables:
            await schema.ensure(connection)
            self._has_tables = True

    def _abandon(self, task: asyncio.Task[object]) -> None:
        """Leave a statement to itself. Cancelling it would have libpq wait for a server that may be gone."""
        connection, self._connection = self._connection, None
        self._abandonments += 1
        if connection is None or connection.closed:
            task.cancel()
        else:
            _hang_up(connection)
        self._abandoned.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[object]) -> None:
        self._abandoned.discard(task)
        if not task.cancelled():
            task.exception()  # seen: whoever waited for it was answered long ago
        # What it may have connected to meanwhile is nobody's.

    async def close(self) -> None:
        """Close the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            _hang_up(connection)
            with contextlib.suppress(psycopg.Error):
                await connection.close()
        for task in list(self._abandoned):
            task.cancel()


def _hang_up(connection: AsyncConnection) -> None:
    """End the conversation without a word: whoever waits for an answer on it gets an error at once."""
    with contextlib.suppress(OSError, psycopg.Error), socket.socket(fileno=os.dup(connection.fileno())) as twin:
        twin.shutdown(socket.SHUT_RDWR)


def _why(error: psycopg.Error) -> str:
    """The first line of what libpq or the server says; neither repeats a password."""
    text = str(error).strip().partition("\n")[0][:300]
    return f"{text} ({error.sqlstate})" if error.sqlstate else text


def _away(why: str) -> FleetUnavailable:
    return FleetUnavailable(
        f"the fleet's database cannot be used: {why}; nothing was dispatched, send the same request again",
        retry_after_s=RETRY_AFTER_S,
    )


def _refused(error: psycopg.Error) -> FleetUnavailable:
    """The server understood and would not: a fault of ours, a role without rights, a standby."""
    log.error("fleet_statement_refused", error_type=type(error).__name__, sqlstate=error.sqlstate)
    return _away(_why(error))
