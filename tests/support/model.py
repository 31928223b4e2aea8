"""A model behind HTTP: an OpenAI-compatible server in a process of its own that sees how each connection ends.

``python -m tests.support.model [TEXT]`` listens on loopback and prints its port.

* ``POST /v1/chat/completions``: says what stands between ``<<`` and ``>>`` in the last such place of the prompt, else
  TEXT, a piece for each word, as Server-Sent Events where ``stream`` asks for them. A prompt with ``use the tool
  NAME(JSON)`` gets that call first, and its words once the tool has answered. One with ``refuse with <<`` is answered
  400, and the words are the error's message.
* ``POST /hold`` ``{"after": N}``: answers that stream stop after N pieces, until ``POST /release``.
* ``GET /requests``: each completion that was asked for, and what became of its connection.
"""

from __future__ import annotations

import contextlib
import json
import re
import select
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec

from tests.support import procs

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 30.0
#: How long a held answer waits, seconds; longer than any test.
HOLD_LIMIT_S = 120.0
POLL_MS = 20
#: Tokens that every answer is said to have used.
PROMPT_TOKENS, COMPLETION_TOKENS = 11, 7
#: What became of a request: being answered, answered whole, or the client's end of the connection went first.
OPEN, ANSWERED, CUT = "open", "answered", "cut"


class Asked(msgspec.Struct, kw_only=True):
    """One request for a completion. ``ended_at``: Unix seconds, when the answer or the connection ended."""

    number: int
    model: str
    streamed: bool
    authorization: str
    pieces_sent: int = 0
    state: str = OPEN
    ended_at: float | None = None


class Server(ThreadingHTTPServer):
    """What all requests share."""

    daemon_threads = True

    def __init__(self, text: str | None) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.text = text
        self.asked: list[Asked] = []
        self.hold_after: int | None = None
        self._lock = threading.Lock()

    def note(self, body: dict[str, Any], authorization: str) -> Asked:
        """Record a request."""
        with self._lock:
            number, streamed = len(self.asked), bool(body.get("stream"))
            asked = Asked(number=number, model=body["model"], streamed=streamed, authorization=authorization)
            self.asked.append(asked)
            return asked

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients may die at any time."""


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: Server
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *values: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        """Say what was asked for."""
        self._answer(msgspec.json.encode(self.server.asked))

    def do_POST(self) -> None:
        """Complete, hold or release."""
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
        if self.path == "/v1/chat/completions":
            self._complete(body)
            return
        self.server.hold_after = body["after"] if self.path == "/hold" else None
        self._answer(b"{}")

    def _complete(self, body: dict[str, Any]) -> None:
        asked = self.server.note(body, self.headers.get("Authorization", ""))
        try:
            deltas = list(_deltas(body, self.server.text))
            if refusal := _refusal(body):
                self._answer(json.dumps({"error": {"message": refusal, "type": "invalid"}}).encode(), status=400)
            elif asked.streamed:
                self._stream(asked, deltas)
            else:
                self._answer(_whole(asked, deltas))
            asked.state = ANSWERED
        except OSError:
            asked.state = CUT
        asked.ended_at = time.time()
        if asked.state == CUT:
            self.close_connection = True

    def _stream(self, asked: Asked, deltas: list[dict[str, Any]]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for delta in deltas:
            self._wait_while_held(asked)
            self._send(_chunk(asked, choices=[{"index": 0, "delta": delta, "finish_reason": None}]))
            asked.pieces_sent += 1
        reason = "tool_calls" if "tool_calls" in deltas[-1] else "stop"
        self._send(_chunk(asked, choices=[{"index": 0, "delta": {}, "finish_reason": reason}]))
        self._send(_chunk(asked, choices=[], usage=_usage()))
        self._send(b"[DONE]")
        self.wfile.write(b"0\r\n\r\n")

    def _wait_while_held(self, asked: Asked) -> None:
        """Wait for the release. Raises ConnectionResetError as soon as the client's end is gone."""
        poller = select.poll()
        poller.register(self.connection, select.POLLIN | select.POLLRDHUP)
        give_up = time.monotonic() + HOLD_LIMIT_S
        while (after := self.server.hold_after) is not None and asked.pieces_sent >= after:
            # The client has said all it had to say: what can be read now is its end.
            if poller.poll(POLL_MS) and not self.connection.recv(1, socket.MSG_PEEK):
                raise ConnectionResetError
            if time.monotonic() > give_up:
                raise TimeoutError

    def _send(self, data: bytes) -> None:
        event = b"data: " + data + b"\n\n"
        self.wfile.write(b"%x\r\n%s\r\n" % (len(event), event))
        self.wfile.flush()

    def _answer(self, data: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _deltas(body: dict[str, Any], otherwise: str | None) -> Iterator[dict[str, Any]]:
    """The answer to a prompt in the pieces in which it is streamed."""
    messages, text = body["messages"], _text(body)
    asked = re.search(r"use the tool (\w+)\((\{.*?\})\)", text)
    if asked and body.get("tools") and not any(message["role"] == "tool" for message in messages):
        name, arguments = asked.groups()
        yield {"role": "assistant", "content": None, "tool_calls": [_call(name, "")]}
        for at in range(0, len(arguments), 8):
            yield {"tool_calls": [{"index": 0, "function": {"arguments": arguments[at : at + 8]}}]}
        return
    places = re.findall(r"<<(.*?)>>", text, re.DOTALL)
    for piece in words_of(places[-1] if places or otherwise is None else otherwise):
        yield {"role": "assistant", "content": piece}


def _text(body: dict[str, Any]) -> str:
    contents = [message.get("content") for message in body["messages"]]
    return "\n".join(content for content in contents if isinstance(content, str))


def _refusal(body: dict[str, Any]) -> str | None:
    found = re.search(r"refuse with <<(.*?)>>", _text(body), re.DOTALL)
    return found and found[1]


def words_of(text: str) -> list[str]:
    """The pieces in which a text is streamed."""
    return re.findall(r"\S+\s*", text)


def _call(name: str, arguments: str) -> dict[str, Any]:
    return {"index": 0, "id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}


def _chunk(asked: Asked, **more: Any) -> bytes:
    chunk = {"id": f"chatcmpl-{asked.number}", "object": "chat.completion.chunk", "created": 1, "model": asked.model}
    return json.dumps(chunk | more).encode()


def _whole(asked: Asked, deltas: list[dict[str, Any]]) -> bytes:
    text = "".join(delta.get("content") or "" for delta in deltas)
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    answer = {"id": f"chatcmpl-{asked.number}", "object": "chat.completion", "created": 1, "model": asked.model}
    return json.dumps(answer | {"choices": [choice], "usage": _usage()}).encode()


def _usage() -> dict[str, int]:
    total = PROMPT_TOKENS + COMPLETION_TOKENS
    return {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": COMPLETION_TOKENS, "total_tokens": total}


class Model:
    """The process. ``text``: what it says to prompts that do not say it."""

    def __init__(self, text: str | None = None) -> None:
        command = [sys.executable, "-m", "tests.support.model", *([] if text is None else [text])]
        self._process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.url = f"http://127.0.0.1:{int(self._process.stdout.readline())}"

    def close(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self._process.communicate()

    @contextlib.contextmanager
    def held(self, *, after: int) -> Iterator[None]:
        """Let answers stop after some pieces."""
        self._post("/hold", {"after": after})
        try:
            yield
        finally:
            self.release()

    def release(self) -> None:
        """Let held answers go on."""
        self._post("/release", {})

    def requests(self) -> list[Asked]:
        """All completions that were asked for."""
        with urllib.request.urlopen(f"{self.url}/requests", timeout=TIMEOUT_S) as answer:
            return msgspec.json.decode(answer.read(), type=list[Asked])

    def wait_held(self, number: int, *, pieces: int) -> None:
        """Wait until that request is being answered and some pieces are sent."""

        def sent() -> bool:
            asked = self.requests()
            return len(asked) > number and asked[number].pieces_sent >= pieces

        procs.wait_until(sent, TIMEOUT_S, f"{pieces} pieces of answer {number} are sent")

    def wait_cut(self, number: int, limit_s: float) -> float:
        """Wait until the client's end of that connection is gone; returns when that was, Unix seconds."""
        procs.wait_until(lambda: self.requests()[number].state == CUT, limit_s, f"connection {number} dies")
        ended_at = self.requests()[number].ended_at
        assert ended_at is not None
        return ended_at

    def _post(self, path: str, body: dict[str, Any]) -> None:
        request = urllib.request.Request(self.url + path, json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            answer.read()


if __name__ == "__main__":
    server = Server(sys.argv[1] if len(sys.argv) > 1 else None)
    sys.stdout.write(f"{server.server_port}\n")
    sys.stdout.flush()
    server.serve_forever()
