"""How many events a second become durable, how soon a reader sees one, and how many readers there may be."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from bench.load import collect, start_load
from bench.measure import Scale, Series, Step, Values
from bench.watching import address, fake_server
from tests.support import procs
from tests.support.server import TOKEN, Server

WORKERS = (1, 8)
READERS = (1, 50, 500)
#: Half of the rates to reach, of all workers together.
HALF_RATE_PER_S = {1: 10_000, 8: 25_000}
#: Chunks of about 130 bytes: a few words and a stamp.
CONTENT_BYTES = 60
#: What a paced reader of many is measured with, events a second.
FAN_OUT_PER_S = 50


class Events:
    """Fakes that emit chunks as fast as they are taken, or at a pace."""

    name = "events"
    title = "Events: from a crew's chunk to the journal's fsync and to a reader of server-sent events"
    notes = (
        "durable: chunks of all workers, from the first one emitted until the last caller has its job's output, which "
        "is sent after the fsync of every event, the kill and the proof; nobody reads",
        "visible: from a chunk's own stamp in the worker until a reader in another process has it, one reader each, "
        f"emitted at {HALF_RATE_PER_S[1]:,} events/s by one worker and {HALF_RATE_PER_S[8]:,} by eight together",
        f"readers, visible: emitted at {FAN_OUT_PER_S} events/s; readers, delivered: emitted as fast as they are taken",
        "bare fsync: what a commit takes at least on this disk; an event waits for the one under way and then its own",
        "bare SQLite: the same rows, WAL, synchronous=FULL, one thread, 256 or one in a transaction",
        "bare sockets: a process that only writes the same bytes, 256 events at once, to as many readers",
    )
    series = (
        *(Series(f"{workers} workers, durable", "1/s") for workers in WORKERS),
        *(Series(f"{workers} workers at half rate, visible", "ms") for workers in WORKERS),
        *(Series(f"{workers} workers at half rate, emitted", "1/s") for workers in WORKERS),
        *(Series(f"{readers} readers, visible", "ms") for readers in READERS),
        *(Series(f"{readers} readers, delivered", "1/s") for readers in READERS),
        Series("bare SQLite, 256 in a transaction, durable", "1/s", baseline=True),
        Series("bare SQLite, one in a transaction, durable", "1/s", baseline=True),
        Series("bare fsync of 8 kB", "ms", baseline=True),
        *(Series(f"bare sockets, {readers} readers, delivered", "1/s", baseline=True) for readers in READERS),
    )
    rounds = (2, 4)

    @contextmanager
    def open(self, directory: Path, scale: Scale) -> Iterator[Sequence[Step]]:
        """One server of fakes."""
        with ExitStack() as stack:
            server = stack.enter_context(fake_server(directory / "server", {"max_concurrency": 16}))
            numbers = count()
            steps = [
                Step("bare SQLite", partial(_bare, directory, scale, numbers)),
                Step("bare fsync", partial(_fsyncs, directory / "synced", scale.pick(5, 50, 100, 200))),
            ]
            for workers in WORKERS:
                steps.append(Step(f"{workers} workers", partial(_durable, server, workers, scale, numbers)))
                steps.append(Step(f"{workers} at half rate", partial(_visible, server, workers, scale, numbers)))
            for readers in READERS[: scale.pick(1, 2, 3, 3)]:
                steps.append(Step(f"{readers} readers", partial(_fan_out, server, readers, scale, numbers)))
                steps.append(Step(f"bare, {readers}", partial(_bare_sockets, readers, scale)))
            yield steps


class _Emission:
    """Jobs of the emitter that wait at their gate, then emit together."""

    def __init__(self, server: Server, workers: int, numbers: Iterator[int], **given: Any) -> None:
        number = next(numbers)
        self.names = [f"emit-{number}-{worker}" for worker in range(workers)]
        self._gate = server.directory / f"gate-{number}"
        self._server = server
        self._given = {"gate": str(self._gate), "bytes": CONTENT_BYTES, **given}
        self._pool = ThreadPoolExecutor(workers)
        self._callers = [self._pool.submit(self._start, name) for name in self.names]
        client = server.client()
        procs.wait_until(lambda: all(_has_started(client, name) for name in self.names), 60, "every emitter has begun")

    def _start(self, name: str) -> tuple[int, int]:
        answer = self._server.client(timeout_s=600).start(name, "emitter", input=self._given).expect(200)
        return answer["began_ns"], time.monotonic_ns()

    def open_gate(self) -> None:
        """Let them emit."""
        self._gate.touch()

    def end(self) -> tuple[int, int]:
        """The first one's beginning and the moment when every caller had its answer, monotonic ns."""
        ended = [caller.result() for caller in self._callers]
        self._pool.shutdown()
        return min(began for began, _ in ended), max(answered for _, answered in ended)


def _has_started(client: Any, name: str) -> bool:
    answer = client.get(name)
    return bool(answer.status == 200 and answer.json()["phase"] == "running")


def _durable(server: Server, workers: int, scale: Scale, numbers: Iterator[int]) -> Values:
    events = scale.pick(500, 20_000, 40_000, 80_000) // (2 if workers > 1 else 1)
    emission = _Emission(server, workers, numbers, events=events)
    emission.open_gate()
    began_ns, ended_ns = emission.end()
    return {f"{workers} workers, durable": [workers * events / (ended_ns - began_ns) * 1e9]}


def _visible(server: Server, workers: int, scale: Scale, numbers: Iterator[int]) -> Values:
    per_s = HALF_RATE_PER_S[workers] // workers
    events = int(per_s * scale.pick(0.1, 1.0, 2.0, 4.0))
    emission = _Emission(server, workers, numbers, events=events, per_s=per_s)
    opened = server.directory / f"opened-{emission.names[0]}"
    paths = [f"/jobs/{name}/events" for name in emission.names]
    load = start_load("follow", **address(server), paths=paths, readers=1, sample=1, opened=str(opened))
    procs.wait_until(opened.exists, 60, "every reader follows")
    emission.open_gate()
    found = collect(load)
    began_ns, ended_ns = emission.end()
    what = f"{workers} workers at half rate"
    return {
        f"{what}, visible": found["latencies_ms"],
        f"{what}, emitted": [workers * events / (ended_ns - began_ns) * 1e9],
    }


def _fan_out(server: Server, readers: int, scale: Scale, numbers: Iterator[int]) -> Values:
    paced, _ = _follow(server, readers, numbers, events=scale.pick(5, 50, 100, 200), per_s=FAN_OUT_PER_S)
    events = _flat_out_events(readers, scale)
    found, began_ns = _follow(server, readers, numbers, events=events, per_s=0)
    return {
        f"{readers} readers, visible": paced["latencies_ms"],
        f"{readers} readers, delivered": [readers * events / (found["ended_ns"] - began_ns) * 1e9],
    }


def _flat_out_events(readers: int, scale: Scale) -> int:
    return scale.pick(200, 5000, 20_000, 40_000) if readers == 1 else scale.pick(200, 1000, 1000, 2000)


def _follow(server: Server, readers: int, numbers: Iterator[int], **given: Any) -> tuple[Any, int]:
    emission = _Emission(server, 1, numbers, **given)
    opened = server.directory / f"opened-{emission.names[0]}"
    path = f"/jobs/{emission.names[0]}/events"
    load = start_load(
        "follow", **address(server), paths=[path], readers=readers, sample=max(1, readers // 10), opened=str(opened)
    )
    procs.wait_until(opened.exists, 60, "every reader follows")
    emission.open_gate()
    found = collect(load)
    began_ns, _ = emission.end()
    return found, began_ns


def _bare(directory: Path, scale: Scale, numbers: Iterator[int]) -> Values:
    data = b'{"content":"%s","emitted_ns":123456789012345,"channel":"messages"}' % (b"x" * CONTENT_BYTES)
    found: dict[str, list[float]] = {}
    batches = (
        ("256", 256, scale.pick(512, 25_600, 51_200, 51_200)),
        ("one", 1, scale.pick(20, 500, 1000, 1000)),
    )
    for name, batch, events in batches:
        with closing(sqlite3.connect(directory / f"bare-{next(numbers)}.db", isolation_level=None)) as database:
            database.execute("PRAGMA journal_mode = WAL").fetchall()
            database.execute("PRAGMA synchronous = FULL")
            database.execute("CREATE TABLE events(job, seq, name, at, data, PRIMARY KEY(job, seq)) WITHOUT ROWID")
            began = time.monotonic()
            for first in range(0, events, batch):
                database.execute("BEGIN IMMEDIATE")
                rows = [(1, seq, "chunk", 1.0, data) for seq in range(first, first + batch)]
                database.executemany("INSERT INTO events VALUES(?, ?, ?, ?, ?)", rows)
                database.execute("COMMIT")
            found[f"bare SQLite, {name} in a transaction, durable"] = [events / (time.monotonic() - began)]
    return found


def _fsyncs(path: Path, times: int) -> Values:
    """Overwriting a file that has its size, as a log does that was cut: what the disk takes for one commit."""
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    spent: list[float] = []
    try:
        os.write(file, b"\0" * 8192 * 64)
        os.fsync(file)
        for number in range(times):
            os.pwrite(file, os.urandom(8192), number % 64 * 8192)
            began = time.perf_counter()
            os.fsync(file)
            spent.append((time.perf_counter() - began) * 1000)
    finally:
        os.close(file)
    return {"bare fsync of 8 kB": spent}


def _bare_sockets(readers: int, scale: Scale) -> Values:
    """An asyncio server in a thread of this process, which does nothing else meanwhile."""
    events = _flat_out_events(readers, scale)
    data = b'{"event":"chunk","sequence":12345,"data":{"content":"%s"}}' % (b"x" * 110)
    frame = b"id: 12345\nevent: chunk\ndata: %s\n\n" % data
    bare = _BareServer(frame, events, readers)
    load = start_load(
        "follow", host="127.0.0.1", port=bare.port, token=TOKEN, paths=["/"], readers=readers, sample=1_000_000
    )
    found = collect(load)
    began_ns = bare.join()
    return {f"bare sockets, {readers} readers, delivered": [readers * events / (found["ended_ns"] - began_ns) * 1e9]}


class _BareServer:
    def __init__(self, frame: bytes, events: int, readers: int) -> None:
        self._frame, self._events, self._readers = frame, events, readers
        self._listening = threading.Event()
        self.port = 0
        self._began_ns = 0
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        self._listening.wait()

    async def _serve(self) -> None:
        writers: list[asyncio.StreamWriter] = []
        complete = asyncio.Event()

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
            writers.append(writer)
            if len(writers) == self._readers:
                complete.set()

        server = await asyncio.start_server(accept, "127.0.0.1", 0, backlog=1024)
        self.port = server.sockets[0].getsockname()[1]
        self._listening.set()
        await complete.wait()
        self._began_ns = time.monotonic_ns()

        async def write(writer: asyncio.StreamWriter) -> None:
            for first in range(0, self._events, 256):
                writer.write(self._frame * min(256, self._events - first))
                await writer.drain()
            writer.close()

        await asyncio.gather(*map(write, writers))
        server.close()
        await asyncio.gather(*(writer.wait_closed() for writer in writers))

    def join(self) -> int:
        """When it began to write, monotonic ns."""
        self._thread.join()
        return self._began_ns
