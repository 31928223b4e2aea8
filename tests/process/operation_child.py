"""Runs one operation in a process forked from a server that has imported CrewAI and never ran anything."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from protocol import frames, pipe
from protocol.effects import ToolPolicy
from tests.support.memory_ledger import MemoryLedger
from worker import failures, operations, registry, stores
from worker.channel import PipeClosed
from worker.pipe_ledger import PipeLedger

REAL = "tests.crews.real_crews:CREWS"
FAKE = "tests.crews.fake_crews:CREWS"
ANSWER_TIMEOUT_S = 60.0
#: The worker's environment, as the sandbox sets it.
ENVIRONMENT = {
    "CREWAI_DISABLE_TELEMETRY": "true",
    "OTEL_SDK_DISABLED": "true",
    "CREWAI_TRACING_ENABLED": "false",
    "CREWAI_TESTING": "true",
    "CREWAI_DISABLE_VERSION_CHECK": "true",
    "OPENBLAS_NUM_THREADS": "1",
}


@contextlib.contextmanager
def importer(home: Path, crews: str) -> Iterator[None]:
    """A process that imports CrewAI and the module ``crews`` once, and that children are forked from meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (ENVIRONMENT | {"HOME": str(home)}).items():
            patch.setenv(name, value)
        server = forkserver.ForkServer()
        patch.setattr(forkserver, "_forkserver", server)
        for function in ("ensure_running", "connect_to_new_process", "set_forkserver_preload"):
            patch.setattr(forkserver, function, getattr(server, function))
        server.set_forkserver_preload(["tests.process.operation_child", crews])
        yield
        server._stop()  # type: ignore[attr-defined]


@dataclass(kw_only=True)
class Order:
    """One operation: the crew of ``spec`` with ``crew_id``, the directories of its crew and job below ``root``."""

    root: Path
    spec: str
    crew_id: str
    operation: str
    input: dict[str, Any]
    job: str = "job"
    store: str = "crew"
    replay_store: str | None = None
    output_limit_bytes: int = 4_194_304
    event_limit: int = 1000
    event_limit_bytes: int = 262_144
    artifact: str | None = None
    #: Effect policies of the configuration, by tool name.
    effects: dict[str, ToolPolicy] = field(default_factory=dict)
    #: Whether the texts of exceptions are said.
    texts: bool = True
    #: Multiprocessing's way to start the child; ``spawn`` is an interpreter that has imported nothing.
    start: str = "forkserver"

    @property
    def job_directory(self) -> Path:
        return self.root / self.job

    def directories(self) -> frames.Directories:
        """Made on the way; ``job``, ``cwd``, ``tmp`` per job, the rest per crew."""
        job, crew = self.job_directory, self.root / self.store
        where = {"job": job, "cwd": job / "cwd", "tmp": job / "tmp"}
        where |= {name: crew / name for name in ("home", "storage", "locks")}
        for path in where.values():
            path.mkdir(parents=True, exist_ok=True)
        return frames.Directories(**{name: str(path) for name, path in where.items()})

    def go(self) -> frames.Go:
        artifact = None if self.artifact is None else str(self.job_directory / self.artifact)
        return frames.Go(
            action_id="operation",
            crew_id=self.crew_id,
            operation=self.operation,
            input=json.dumps(self.input).encode(),
            output_limit_bytes=self.output_limit_bytes,
            event_limit_bytes=self.event_limit_bytes,
            event_limit=self.event_limit,
            replay_store=self.replay_store,
            artifact_path=artifact,
            effects=self.effects,
        )


def serve(order: Order, connection: Connection) -> None:
    """The child's life. Its standard input is a pipe that never says anything and never ends."""
    silent, _held_open = os.pipe()
    os.dup2(silent, 0)
    log = os.open(order.root / f"{order.job}.log", os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    crews = registry.load(order.spec, ())
    directories = order.directories()
    os.environ.update(HOME=directories.home, TMPDIR=directories.tmp)
    os.chdir(directories.cwd)
    lock = threading.Lock()

    def send(frame: frames.Frame) -> None:
        with lock:
            try:
                connection.send_bytes(pipe.encode(frame))
            except OSError as error:
                raise PipeClosed(str(error)) from None

    cancellation = operations.Cancellation()

    ledger = PipeLedger(send)
    heard: pipe.Decoder[Any] = pipe.Decoder(frames.ToWorker)

    def listen() -> None:
        while True:
            (frame,) = heard.feed(connection.recv_bytes())
            if isinstance(frame, frames.Cancel):
                send(frames.CancelAnswer(closing=cancellation.request()))
            else:
                ledger.answered(frame)

    threading.Thread(target=listen, daemon=True).start()
    failures.speak(texts=order.texts)
    stores.redirect(directories, order.replay_store)
    ending = operations.perform(
        crews[order.crew_id],
        order.go(),
        directories=directories,
        evaluators=registry.evaluators(order.spec),
        send=send,
        cancelled=cancellation,
        ledger=ledger,
        policies=registry.effects(order.spec, crews).get(order.crew_id, {}),
    )
    send(ending)
    os._exit(0)


class Child:
    """The test's side of one operation."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.chunks: list[dict[str, Any]] = []
        self.raw: list[bytes] = []
        #: Where the child's effects are claimed.
        self.ledger = MemoryLedger(crew_id=order.crew_id)
        self._decoder: pipe.Decoder[Any] = pipe.Decoder(frames.FromWorker)
        server: Any = multiprocessing.get_context(order.start)
        self._connection, theirs = server.Pipe()
        self.process = server.Process(target=serve, args=(order, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def receive(self) -> Any:
        """The next frame that is not about an effect; those are answered, and chunks are also collected."""
        while True:
            assert self._connection.poll(ANSWER_TIMEOUT_S), f"no frame; chunks so far: {self.chunks}"
            (frame,) = self._decoder.feed(self._connection.recv_bytes())
            if not isinstance(frame, frames.AboutEffect):
                break
            if (answer := self.ledger.answer(frame)) is not None:
                self._connection.send_bytes(pipe.encode(answer))
        if isinstance(frame, frames.Chunk):
            assert frame.data.isascii()
            self.raw.append(frame.data)
            self.chunks.append(json.loads(frame.data))
        return frame

    def wait_for(self, **wanted: Any) -> dict[str, Any]:
        """The next chunk that has all of ``wanted``."""
        while True:
            frame = self.receive()
            assert isinstance(frame, frames.Chunk), f"{frame} before a chunk with {wanted}"
            if self.chunks[-1].items() >= wanted.items():
                return self.chunks[-1]

    def cancel(self) -> None:
        self._connection.send_bytes(pipe.encode(frames.Cancel()))

    def ending(self) -> frames.Result | frames.Failure:
        """The result or failure, after the chunks before it."""
        while isinstance(frame := self.receive(), frames.Chunk):
            pass
        assert isinstance(frame, frames.Result | frames.Failure)
        return frame

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self._connection.close()

    def output(self) -> dict[str, Any]:
        """The output of a result."""
        ending = self.ending()
        assert isinstance(ending, frames.Result), f"{ending}\n{self.log()}"
        assert ending.output.isascii()
        self.task_ids = ending.task_ids
        document: dict[str, Any] = json.loads(ending.output)
        return document

    def failure(self) -> frames.Failure:
        ending = self.ending()
        assert isinstance(ending, frames.Failure), ending
        return ending

    def log(self) -> str:
        path = self.order.root / f"{self.order.job}.log"
        return path.read_text(errors="replace")[-4000:] if path.exists() else ""

    def kinds(self, channel: str) -> list[str]:
        return [chunk.get("type", "") for chunk in self.chunks if chunk["channel"] == channel]
