"""A relay of bytes between two sockets that can be cut without a word, or lose what it was to pass on."""

from __future__ import annotations

import contextlib
import random
import selectors
import socket
import threading
from types import TracebackType
from typing import Self


class TcpRelay:
    """Listens on a port of its own and passes bytes to ``host:port`` and back, until told otherwise.

    ``cut``: nothing passes and nobody is told, as behind a link that is down. ``lose``: so often, chosen by ``seed``,
    the connection breaks: either what the client sent never arrives, or it does and the answer is lost.
    """

    def __init__(self, host: str, port: int, *, seed: int = 0) -> None:
        self._target = (host, port)
        self._random = random.Random(seed)
        self._chance = 0.0
        self._cut = False
        self._ended = False
        self._lock = threading.Lock()
        self._pairs: dict[socket.socket, socket.socket] = {}
        #: Connections whose next answer is lost.
        self._doomed: set[socket.socket] = set()
        #: How often each kind of loss has happened.
        self.lost_requests = 0
        self.lost_answers = 0

    def __enter__(self) -> Self:
        self._selector = selectors.DefaultSelector()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._waker, self._woken = socket.socketpair()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tell(lambda: setattr(self, "_ended", True))
        self._thread.join()
        for end in [*self._pairs, self._listener, self._waker, self._woken]:
            end.close()
        self._selector.close()

    def _tell(self, act: object) -> None:
        with self._lock:
            assert callable(act)
            act()
        self._waker.send(b".")

    def cut(self) -> None:
        """Let nothing pass from now on."""
        self._tell(lambda: setattr(self, "_cut", True))

    def heal(self) -> None:
        """Pass again what comes, and what had come."""
        self._tell(lambda: setattr(self, "_cut", False))

    def lose(self, chance: float) -> None:
        """Break the connection at so many of the client's messages, in one of the two ways."""
        self._tell(lambda: setattr(self, "_chance", chance))

    def _run(self) -> None:
        while True:
            ready = [key.fileobj for key, _ in self._selector.select(0.2)]
            with self._lock:
                if self._ended:
                    return
                for end in ready:
                    assert isinstance(end, socket.socket)
                    self._serve(end)

    def _serve(self, end: socket.socket) -> None:
        if end is self._woken:
            end.recv(4096)
        elif self._cut:
            # Level-triggered, so it is looked at again; the pause keeps that cheap.
            threading.Event().wait(0.02)
        elif end is self._listener:
            with contextlib.suppress(OSError):
                self._connect()
        elif end in self._pairs:
            self._pass(end)

    def _connect(self) -> None:
        client, _ = self._listener.accept()
        try:
            server = socket.create_connection(self._target, 5)
        except OSError:
            client.close()
            return
        for one, other in ((client, server), (server, client)):
            self._pairs[one] = other
            self._selector.register(one, selectors.EVENT_READ, None)
        self._clients = {*getattr(self, "_clients", set()), client}

    def _pass(self, end: socket.socket) -> None:
        try:
            data = end.recv(65_536)
        except OSError:
            data = b""
        if not data or self._loses(end):
            self._drop(end)
            return
        try:
            self._pairs[end].sendall(data)
        except OSError:
            self._drop(end)

    def _loses(self, end: socket.socket) -> bool:
        if end not in self._clients:
            if end in self._doomed:
                self.lost_answers += 1
            return end in self._doomed
        if self._random.random() >= self._chance:
            return False
        if self._random.random() < 0.5:
            self.lost_requests += 1
            return True
        self._doomed.add(self._pairs[end])
        return False

    def _drop(self, end: socket.socket) -> None:
        other = self._pairs.pop(end)
        self._pairs.pop(other, None)
        for one in (end, other):
            self._doomed.discard(one)
            self._clients.discard(one)
            self._selector.unregister(one)
            one.close()
