"""A worker's whole life: sandbox, hello, go, the operation, its result, exit."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import socket
import sys
import threading
from collections.abc import Mapping
from typing import NoReturn

from protocol import frames, points
from protocol.errors import ProtocolViolation
from worker import failures, operations, registry, sandbox, stores
from worker.channel import Channel, PipeClosed
from worker.pipe_ledger import PipeLedger

#: Exit codes of a worker, seen in the stop evidence.
EXIT_OK = 0
EXIT_SANDBOX = 70
EXIT_PIPE = 71

WorkerChannel = Channel[frames.ToWorker]


class Descriptors:
    """The descriptors of one Launch, in their order on the wire."""

    def __init__(self, launch: frames.Launch, received: list[int]) -> None:
        if len(received) != 3 + launch.leaf + launch.keeper:
            raise ProtocolViolation(f"launch {launch.launch_id} came with {len(received)} descriptors")
        self.protocol, self.stdout, self.stderr = received[:3]
        self.leaf = received[3] if launch.leaf else None
        self.keeper = received[-1] if launch.keeper else None


def become_worker(
    launch: frames.Launch,
    descriptors: Descriptors,
    *,
    crews: Mapping[str, object],
    evaluators: Mapping[str, object],
    effects: registry.Policies,
    open_files: tuple[int, int],
    in_leaf: bool,
    namespace: bool,
    parent_pid: int | None,
) -> NoReturn:
    """Turn this process into the worker of ``launch``; never returns.

    ``parent_pid``: whose death kills us, None where the parent is a template that may be recycled. ``namespace``:
    this is the init of a new PID namespace.
    """
    code = EXIT_SANDBOX
    points.reach("worker.born")
    try:
        if namespace:
            parent_pid = 0
            # Where mounting is refused, /proc inside shows the supervisor's pids; nothing of the proof depends on it.
            with contextlib.suppress(OSError):
                sandbox.show_own_processes()
        channel = _enter_sandbox(launch, descriptors, open_files=open_files, in_leaf=in_leaf, parent_pid=parent_pid)
        code = _serve(channel, launch, crews, evaluators, effects)
    except (PipeClosed, ProtocolViolation):
        code = EXIT_PIPE
    except BaseException as error:  # noqa: BLE001 - the process boundary: whatever it was, it ends here
        with contextlib.suppress(BaseException):
            failures.say(error)
    finally:
        _leave(code)


def _enter_sandbox(
    launch: frames.Launch,
    descriptors: Descriptors,
    *,
    open_files: tuple[int, int],
    in_leaf: bool,
    parent_pid: int | None,
) -> WorkerChannel:
    if descriptors.leaf is not None and not in_leaf:
        sandbox.join_leaf(descriptors.leaf)
    sandbox.reset_signals()
    if os.getsid(0) != os.getpid():
        os.setsid()
    sandbox.set_limits(launch, open_files)
    protocol_fd = sandbox.place_descriptors(descriptors.protocol, descriptors.stdout, descriptors.stderr)
    if parent_pid is not None:
        sandbox.die_with_parent(parent_pid)
    sandbox.set_environment(launch)
    sandbox.reseed()
    _buffer_by_line()
    failures.speak(texts=launch.log_exceptions)
    gc.enable()
    return WorkerChannel(socket.socket(fileno=protocol_fd), frames.ToWorker)


def _buffer_by_line() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)


def _serve(
    channel: WorkerChannel,
    launch: frames.Launch,
    crews: Mapping[str, object],
    evaluators: Mapping[str, object],
    effects: registry.Policies,
) -> int:
    points.reach("worker.enclosed")
    channel.send(frames.Hello(version=frames.PROTOCOL_VERSION, pid=os.getpid()))
    go, _ = channel.receive()
    if not isinstance(go, frames.Go):
        raise ProtocolViolation(f"expected go, got {type(go).__name__}")
    points.reach("worker.told")
    cancellation = operations.Cancellation()
    ledger = PipeLedger(channel.send)
    try:
        threading.Thread(target=_listen, args=(channel, cancellation, ledger), name="protocol", daemon=True).start()
    except RuntimeError as error:
        # EAGAIN of pthread_create(3): pids.max, RLIMIT_NPROC or RLIMIT_AS is reached. Nothing of the crew has run.
        print(f"{error}: a limit of processes or memory is reached", file=sys.stderr)
        channel.send(frames.Failure(error_type="LaunchError", dispatched=False))
        return EXIT_OK
    stores.redirect(launch.directories, go.replay_store)
    ending = operations.perform(
        crews[launch.crew_id],
        go,
        directories=launch.directories,
        evaluators=evaluators,
        send=channel.send,
        cancelled=cancellation,
        ledger=ledger,
        policies=effects.get(launch.crew_id, {}),
    )
    if isinstance(ending, frames.Failure) and ending.detail:
        print(ending.detail, file=sys.stderr)
    points.reach("worker.finished")
    channel.send(ending)
    points.reach("worker.answered")
    return EXIT_OK


def _listen(channel: WorkerChannel, cancellation: operations.Cancellation, ledger: PipeLedger) -> None:
    """Answer cancels, pass on the ledger's answers; at the end of the pipe the supervisor is gone, and so are we."""
    try:
        while True:
            frame, _ = channel.receive()
            if isinstance(frame, frames.Cancel):
                channel.send(frames.CancelAnswer(closing=cancellation.request()))
            elif not isinstance(frame, frames.Go):
                ledger.answered(frame)
    except (PipeClosed, ProtocolViolation, OSError):
        ledger.close()
        os._exit(EXIT_PIPE)


def _leave(code: int) -> NoReturn:
    """Exit at once: atexit hooks and foreign threads can hold ``sys.exit`` for minutes."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BaseException):
            stream.flush()
    os._exit(code)
