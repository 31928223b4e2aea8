"""A client in a process of its own that costs the machine little: kept-alive sockets, requests encoded before.

``send_load`` runs it; the order goes in as JSON and what was measured comes back as JSON. Times are monotonic.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DEADLINE_S = 600.0
#: Monotonic ns at which a crew emitted a chunk, in the chunk's data.
EMITTED = re.compile(rb'"emitted_ns":(\d+)')


def send_load(kind: str, **order: Any) -> Any:
    """Run one of KINDS in a process of its own. Raises RuntimeError when it breaks."""
    process = start_load(kind, **order)
    return collect(process)


def start_load(kind: str, **order: Any) -> subprocess.Popen[str]:
    """``send_load`` without waiting."""
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.load"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps({"kind": kind, **order}))
    process.stdin.close()
    process.stdin = None
    return process


def collect(process: subprocess.Popen[str]) -> Any:
    """What a load has measured, once it has ended."""
    try:
        output, errors = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
        process.wait()
    if process.returncode != 0:
        raise RuntimeError(f"the load broke: {errors[-2000:]}")
    return json.loads(output)


class Caller(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        head = bytes(self._buffer[:end]).lower()
        found = re.search(rb"content-length: (\d+)", head)
        whole = end + 4 + (int(found[1]) if found else 0)
        if len(self._buffer) >= whole and self._answer is not None and not self._answer.done():
            body = bytes(self._buffer[end + 4 : whole])
            del self._buffer[:whole]
            self._answer.set_result((int(head[9:12]), body))

    def connection_lost(self, error: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionError(f"the server hung up: {error}"))

    def send(self, request: bytes) -> asyncio.Future[tuple[int, bytes]]:
        """The status and the body."""
        assert self._transport is not None
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._answer

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


def encode_start(order: dict[str, Any], number: int) -> bytes:
    """A start as the wire has it."""
    action_id = f"{order['prefix']}{number}"
    body = json.dumps(
        {"crew_id": order["crew"], "action_id": action_id, "operation": "run", "input": order.get("input", {})}
    )
    head = _head("POST", "/jobs", order) + f"X-AIP-Action-ID: {action_id}\r\nIdempotency-Key: key-{action_id}\r\n"
    if order.get("respond_async"):
        head += "Prefer: respond-async\r\n"
    return f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode("ascii")


def _head(method: str, path: str, order: dict[str, Any]) -> str:
    return (
        f"{method} {path} HTTP/1.1\r\nHost: {order['host']}:{order['port']}\r\n"
        f"Authorization: Bearer {order['token']}\r\n"
    )


async def starts(order: dict[str, Any]) -> Any:
    """``clients`` that start ``count`` jobs between them, each the next one once it has its answer."""
    expected = 202 if order.get("respond_async") else 200
    requests = iter([encode_start(order, number) for number in range(order["count"])])
    latencies: list[float] = []

    async def client(caller: Caller) -> None:
        for request in requests:
            sent = time.perf_counter()
            status, body = await caller.send(request)
            latencies.append((time.perf_counter() - sent) * 1000)
            if status != expected:
                raise RuntimeError(f"status {status}: {body[:300]!r}")

    callers = [await _connect(order) for _ in range(order["clients"])]
    began = time.monotonic()
    await asyncio.gather(*map(client, callers))
    seconds = time.monotonic() - began
    for caller in callers:
        caller.close()
    return {"seconds": seconds, "latencies_ms": latencies}


async def _connect(order: dict[str, Any]) -> Caller:
    _, caller = await asyncio.get_running_loop().create_connection(Caller, order["host"], order["port"])
    return caller


async def probe(order: dict[str, Any]) -> Any:
    """GET ``path`` ``count`` times, one every ``period_s`` whether the ones before were answered or not."""
    request = (_head("GET", order["path"], order) + "\r\n").encode("ascii")
    idle: list[Caller] = [await _connect(order)]
    latencies: list[float] = []

    async def ask() -> None:
        sent = time.perf_counter()
        caller = idle.pop() if idle else await _connect(order)
        status, body = await caller.send(request)
        latencies.append((time.perf_counter() - sent) * 1000)
        if status != 200:
            raise RuntimeError(f"status {status}: {body[:300]!r}")
        idle.append(caller)

    began = time.perf_counter()
    async with asyncio.TaskGroup() as asking:
        for number in range(order["count"]):
            await asyncio.sleep(max(0.0, began + number * order["period_s"] - time.perf_counter()))
            asking.create_task(ask())
    for caller in idle:
        caller.close()
    return {"latencies_ms": latencies}


class Reader(asyncio.Protocol):
    """Follows a stream to its end; ``latencies`` of chunks where it looks at them at all."""

    def __init__(self, request: bytes, *, looks: bool) -> None:
        self._request = request
        self._looks = looks
        self._rest = b""
        self.bytes = 0
        self.head = b""
        self.latencies: list[float] = []
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic_ns()
        if not self.bytes:
            self.head = data[:200]
            self.opened.set_result(None)
        self.bytes += len(data)
        if self._looks:
            # A stamp that is cut by the end of a read is looked at with the next one.
            text = self._rest + data
            end = text.rfind(b"\n\n")
            self._rest = text[end + 2 :] if end >= 0 else text
            self.latencies += [(now - int(found[1])) / 1e6 for found in EMITTED.finditer(text[: end + 2])]

    def connection_lost(self, error: Exception | None) -> None:
        if not self.opened.done():
            self.opened.set_exception(ConnectionError(f"the stream did not open: {error}"))
        self.ended.set_result(time.monotonic_ns())


async def follow(order: dict[str, Any]) -> Any:
    """``readers`` of each of ``paths`` until the streams end; every ``sample``-th of them looks at the events."""
    loop = asyncio.get_running_loop()
    readers: list[Reader] = []
    for path in order["paths"]:
        request = (_head("GET", path, order) + "Accept: text/event-stream\r\nConnection: close\r\n\r\n").encode("ascii")
        for number in range(order["readers"]):
            looks = number % order["sample"] == 0
            _, reader = await loop.create_connection(
                lambda request=request, looks=looks: Reader(request, looks=looks), order["host"], order["port"]
            )
            readers.append(reader)
    await asyncio.gather(*(reader.opened for reader in readers))
    if order.get("opened"):
        Path(order["opened"]).touch()
    ended = await asyncio.gather(*(reader.ended for reader in readers))
    if not all(b" 200 " in reader.head for reader in readers):
        raise RuntimeError(f"a stream was refused: {readers[0].head!r}")
    return {
        "ended_ns": max(ended),
        "bytes": [reader.bytes for reader in readers],
        "latencies_ms": [latency for reader in readers for latency in reader.latencies],
    }


KINDS = {"starts": starts, "probe": probe, "follow": follow}


def main() -> None:
    """Carry out the order on stdin."""
    order = json.load(sys.stdin)
    json.dump(asyncio.run(KINDS[order["kind"]](order)), sys.stdout)


if __name__ == "__main__":
    main()
