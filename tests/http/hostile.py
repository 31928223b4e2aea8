"""200 requests that no decent client sends, by kind, each with the answers that are right for it."""

from __future__ import annotations

import gzip
import json
import random
import socket
import struct
from collections.abc import Iterator

import msgspec

from tests.support.raw import RawConnection, head
from tests.support.server import TOKEN

MIB = 1 << 20
#: Stands for the end of the connection without an answer.
CLOSED = 0
JSON = {"Content-Type": "application/json", "Idempotency-Key": "k"}
CHUNKED = {**JSON, "Transfer-Encoding": "chunked"}
START = json.dumps({"crew_id": "nobody", "action_id": "a"}).encode()


class Hostile(msgspec.Struct, frozen=True, kw_only=True):
    """What to send, and every status that may come back: for each answer expected, in order, a set.

    ``end``: what the sender does behind its bytes: ``wait`` for answers, ``finish`` its half, ``reset`` the connection.
    ``forbidden``: bytes that no answer may hold. ``late``: segments to send after the first answer.
    """

    kind: str
    segments: tuple[bytes, ...]
    answers: tuple[frozenset[int], ...]
    end: str = "wait"
    late: tuple[bytes, ...] = ()
    forbidden: bytes = b"\0no such bytes\0"

    def play(self, host: str, port: int) -> list[str]:
        """Send it and return what was wrong with the answers; that none comes is wrong too."""
        with RawConnection(host, port) as connection:
            connection.send(*self.segments)
            if self.end == "reset":
                connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return []
            if self.end == "finish":
                connection.finish()
            return [wrong for number in range(len(self.answers)) for wrong in self._answer(connection, number)]

    def _answer(self, connection: RawConnection, number: int) -> Iterator[str]:
        try:
            answer = connection.answer()
        except TimeoutError:
            yield f"{self.kind}: neither answered nor closed: {self.segments[0][:300]!r}"
            return
        status = CLOSED if answer is None else answer.status
        if status not in self.answers[number]:
            yield f"{self.kind}: answer {number} is {status}, not among {set(self.answers[number])}: {answer!r:.500}"
        if answer is not None and self.forbidden in answer.body:
            yield f"{self.kind}: the answer repeats {self.forbidden!r}"
        if number == 0:
            connection.send(*self.late)


def one(kind: str, *segments: bytes, allow: set[int], **more: object) -> Hostile:
    """A case with one answer."""
    return msgspec.structs.replace(
        Hostile(kind=kind, segments=segments, answers=(frozenset(allow),)), **more
    )


def hostile_requests(seed: int) -> list[Hostile]:
    """All of them, in an order that the seed decides."""
    dice = random.Random(seed)
    made = [
        *_truncated(dice), *_pipelined(), *_slow(), *_large(), *_chunks(), *_garbage(dice), *_lengths(),
        *_expectations(), *_targets(), *_methods(), *_headers(), *_encodings(), *_bodies(), *_unread(),
    ]  # fmt: skip
    dice.shuffle(made)
    return made


def _truncated(dice: random.Random) -> Iterator[Hostile]:
    whole = head("POST", b"/jobs", token=TOKEN, headers={**JSON, "Content-Length": str(len(START))}) + START
    for _ in range(12):
        cut = dice.randrange(1, len(whole) - 1)
        yield one("truncated", whole[:cut], allow={CLOSED, 400}, end="finish")
    for _ in range(8):
        cut = dice.randrange(1, len(whole) - 1)
        yield one("reset in the middle", whole[:cut], allow=set(), end="reset")
    yield one("nothing at all", allow={CLOSED}, end="finish")
    yield one("connects and resets", allow=set(), end="reset")


def _pipelined() -> Iterator[Hostile]:
    good, bad = head(token=TOKEN), head()
    for count in (2, 20, 100):
        yield Hostile(kind="pipelined", segments=(good * count,), answers=(frozenset({200}),) * count)
        yield Hostile(kind="pipelined without token", segments=(bad * count,), answers=(frozenset({401}),) * count)
    mixed = (good, bad) * 5
    statuses = (frozenset({200}), frozenset({401})) * 5
    yield Hostile(kind="pipelined, mixed", segments=(b"".join(mixed),), answers=statuses)
    yield one("pipelined, garbage behind", good + b"\0\1\2\r\n\r\n", allow={200, 400})
    slowly = tuple(bytes([byte]) for byte in good * 2)
    yield Hostile(kind="pipelined, a byte at a time", segments=slowly, answers=(frozenset({200}),) * 2)
    for _ in range(3):
        yield one("pipelined 1000, none read", good * 1000, allow=set(), end="reset")


def _slow() -> Iterator[Hostile]:
    start = head("POST", b"/jobs", token=TOKEN, headers={**JSON, "Content-Length": str(len(START))})
    for step in (1, 3, 7):
        pieces = tuple(START[at : at + step] for at in range(0, len(START), step))
        yield one("slow body", start, *pieces, allow={404})
    for _ in range(5):
        yield one("body that never ends", start, START[:5], allow={CLOSED, 400}, end="finish")
        yield one("body that never comes", head("POST", b"/jobs", headers={"Content-Length": "9"}), allow={401})


def _large() -> Iterator[Hostile]:
    for size in (9_000, 65_536, MIB):
        yield one("huge header", head(headers={"X-Big": "x" * size}), allow={400, CLOSED})
        yield one("huge header name", head(headers={"X" * size: "x"}), allow={400, CLOSED})
        yield one("huge URL", head(target=b"/health?" + b"x" * size), allow={400, CLOSED})
        yield one("huge key", head("POST", b"/jobs", token=TOKEN, headers={**JSON, "Idempotency-Key": "k" * size}),
                  allow={400, 422, CLOSED})  # fmt: skip
    for count in (129, 1000, 20_000):
        yield one("many headers", head(headers={f"X-{number}": "x" for number in range(count)}), allow={400, CLOSED})
    block = b"x" * MIB
    for token, status in ((None, 401), (TOKEN, 413)):
        sized = head("POST", b"/jobs", token=token, headers={**JSON, "Content-Length": str(64 * MIB)})
        yield one("64 MiB body", sized, *([block] * 64), allow={status})
        chunked, chunk = head("POST", b"/jobs", token=token, headers=CHUNKED), b"100000\r\n" + block + b"\r\n"
        yield one("64 MiB body in chunks", chunked, *([chunk] * 64), b"0\r\n\r\n", allow={status})
    promised = head("POST", b"/jobs", token=TOKEN, headers={**JSON, "Content-Length": str(4 << 30)})
    yield one("4 GiB promised", promised, allow={413})


def _chunks() -> Iterator[Hostile]:
    start = head("POST", b"/jobs", token=TOKEN, headers=CHUNKED)
    size = b"%x" % len(START)
    for bad in (b"zz", b"-1", b"", b"0x5", b"5 5", b"f" * 17, b"f" * 100, b"5\0", b"\xff"):
        yield one("bad chunk size", start + bad + b"\r\n" + START + b"\r\n0\r\n\r\n", allow={400, CLOSED})
        yield one("bad chunk size, later", start, bad + b"\r\n" + START, allow={400, CLOSED}, end="finish")
    yield one("chunk too long", start + b"3\r\n" + START + b"\r\n0\r\n\r\n", allow={400, CLOSED})
    whole = size + b"\r\n" + START + b"\r\n0\r\n"
    yield one("trailers", start + whole + b"X-Trailer: x\r\n\r\n", allow={404})
    yield one("trailers that pose as headers", start + whole + b"Authorization: Bearer no\r\n\r\n", allow={404})
    yield one("huge trailer", start + whole + b"X: " + b"x" * 65_536 + b"\r\n\r\n", allow={400, CLOSED})
    yield one("many trailers", start + whole + b"X: x\r\n" * 5000 + b"\r\n", allow={400, 404, CLOSED})
    yield one("chunk extensions", start + size + b";a=b;" + b"x" * 1000 + b"\r\n" + START + b"\r\n0\r\n\r\n",
              allow={404, 400, CLOSED})  # fmt: skip
    tiny = b"".join(b"1\r\n%c\r\n" % byte for byte in START * 500)
    yield one("chunks of one byte", start + tiny + b"0\r\n\r\n", allow={422})
    both = head("POST", b"/jobs", token=TOKEN, headers={**CHUNKED, "Content-Length": "5"})
    yield one("chunked and sized", both + whole + b"\r\n", allow={400, CLOSED})
    for coding in ("chunked, chunked", "gzip", "identity", "chunked, gzip", "xchunked"):
        odd = head("POST", b"/jobs", token=TOKEN, headers={**JSON, "Transfer-Encoding": coding})
        yield one("odd transfer coding", odd + whole + b"\r\n", allow={400, 404, 422, CLOSED}, end="finish")


def _garbage(dice: random.Random) -> Iterator[Hostile]:
    for size in (1, 10, 100, 1000, 10_000, 100_000):
        yield one("random bytes", dice.randbytes(size), allow={400, CLOSED}, end="finish")
    yield one("TLS", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + dice.randbytes(500), allow={400, CLOSED})
    yield one("HTTP/0.9", b"GET /health\r\n\r\n", allow={400, 401, CLOSED})
    yield one("HTTP/0.9 in words", b"GET /health HTTP/0.9\r\n\r\n", allow={400, 401, CLOSED})
    yield one("HTTP/2 preface", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", allow={400, CLOSED})
    yield one("HTTP/9.9", b"GET /health HTTP/9.9\r\nHost: x\r\n\r\n", allow={400, 401, CLOSED})
    yield one("HTTP/1.0", b"GET /health HTTP/1.0\r\n\r\n", allow={401})
    yield one("no host", b"GET /livez HTTP/1.1\r\n\r\n", allow={400, CLOSED})
    yield one("only line ends", b"\r\n" * 5000, allow={400, CLOSED}, end="finish")
    yield one("only zeros", b"\0" * 100_000, allow={400, CLOSED})


def _lengths() -> Iterator[Hostile]:
    for value in ("-1", "+5", "abc", "1e3", "5, 5", "", "5 5", "0x5", "9" * 30, "5\0", "\uff15"):
        bad = head("POST", b"/jobs", token=TOKEN, headers={**JSON, "Content-Length": value})
        yield one("bad length", bad + START, allow={400, CLOSED})
    twice = head("POST", b"/jobs", token=TOKEN, headers={**JSON, "Content-Length": "5", "content-length": "6"})
    same = head("POST", b"/jobs", token=TOKEN, headers={**JSON, "Content-Length": "5", "content-length": "5"})
    yield one("two lengths", twice + START, allow={400, CLOSED})
    yield one("one length twice", same + START, allow={400, CLOSED})
    for path in (b"/health", b"/jobs"):
        sized = head(target=path, token=TOKEN, headers={"Content-Length": "3"})
        yield one("a body on GET", sized + b"abc", allow={200})


def _expectations() -> Iterator[Hostile]:
    asked = {**JSON, "Content-Length": str(len(START)), "Expect": "100-continue"}
    # 100 is an answer of its own here: http.client skips it, so it is looked for in the raw bytes by another test.
    for path in (b"/jobs", b"/jobs/stream", b"/jobs/a/cancel", b"/nowhere"):
        yield one("expects without token", head("POST", path, headers=asked), allow={401})
    yield one("expects with token", head("POST", b"/jobs", token=TOKEN, headers=asked), START, allow={404})
    yield one("expects a cake", head("POST", b"/jobs", token=TOKEN, headers={**asked, "Expect": "cake"}), allow={417})


def _targets() -> Iterator[Hostile]:
    for target in (
        b"/jobs/\xff\xfe", b"/jobs/%ff%fe", b"/jobs/%ed%a0%80", b"/jobs/\xc3\xa9", b"/jobs/%00", b"/jobs/%",
        b"/jobs/%zz", b"/jobs/..%2f..%2fetc", b"/jobs/a%0d%0aX-Evil:1", b"/jobs?cursor=%ff",
        b"/jobs?crew_id=%ed%a0%80", b"/jobs?limit=%00", b"/jobs/a/events?cursor=" + b"9" * 5000,
        b"//evil.example/", b"//evil.example", b"/\\evil.example/", b"?", b"/?",
    ):  # fmt: skip
        yield one(f"target {target[:30]!r}", head(target=target, token=TOKEN), allow={200, 400, 404, 422, CLOSED})
    for target in (b"/health\0", b"/hea lth", b"health", b"", b"/health#x"):
        yield one(f"target {target!r}", head(target=target, token=TOKEN), allow={200, 400, 404, CLOSED})
    for target in (b"http://evil.example/health", b"http://localhost/health", b"https://[::1]:1/health", b"http://[/health"):
        yield one("absolute target", head(target=target), allow={400, 401, 404, CLOSED})


def _methods() -> Iterator[Hostile]:
    for line in ("OPTIONS *", "OPTIONS /jobs", "TRACE /health", "CONNECT evil.example:443", "CONNECT /jobs"):
        method, target = line.split()
        yield one(line, head(method, target.encode()), allow={400, 401, CLOSED})
        yield one(line, head(method, target.encode(), token=TOKEN), allow={400, 404, 405, CLOSED})
    for method in ("get", "G T", "BREW", "X" * 10_000, "G\0T"):
        yield one("odd method", head(method, token=TOKEN), allow={400, 405, CLOSED})


def _headers() -> Iterator[Hostile]:
    for line in (
        b"X-Zero: a\0b", b"X\0: a", b"X : a", b" X: a", b": a", b"X", b"X: a\r\n folded", b"X: a\rb", b"\xff: a",
        b"X: \xff",
    ):  # fmt: skip
        raw = head(token=TOKEN)[:-2] + line + b"\r\n\r\n"
        yield one(f"header {line!r}", raw, allow={200, 400, CLOSED})
    for scheme in (b"Bearer \xff", b"bearer ", b"Bearer  ", b"Basic ", b"\xc3\xa9 ", b"Bearer\t", b""):
        yield one("odd credential", head(headers={"Authorization": scheme + TOKEN.encode()}), allow={401})
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    yield one("websocket", head(headers=upgrade) + b"\x81\x05hello" * 1000, allow={401, 400})
    yield one("h2c", head(headers={"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AA"}),
              allow={401, 400})  # fmt: skip


def _encodings() -> Iterator[Hostile]:
    bomb = gzip.compress(b" " * (64 * MIB))
    small = gzip.compress(START)
    for body, coding, allow in (
        (bomb, "gzip", {413}),
        (small, "gzip", {404}),
        (small[:-9], "gzip", {400, 404}),
        (b"no gzip at all", "gzip", {400}),
        (START, "deflate", {400}),
        (START, "cake", {404}),
    ):
        sized = head("POST", b"/jobs", token=TOKEN,
                     headers={**JSON, "Content-Encoding": coding, "Content-Length": str(len(body))})  # fmt: skip
        yield one(f"coded as {coding}", sized + body, allow={*allow, CLOSED} if 404 not in allow else allow)


def _bodies() -> Iterator[Hostile]:
    for body in (
        b"[" * MIB, b'{"a":' * 200_000, b"1" * MIB, b'"' + b"x" * MIB, b"\xff\xfe", b'{"crew_id":"\xff"}', b"",
        b'{"crew_id":"\\ud800","action_id":"a"}', b"\xef\xbb\xbf{}", b"{}\0", b"null", b"[]", b"NaN", b"{" + b" " * MIB,
    ):  # fmt: skip
        sized = head("POST", b"/jobs", token=TOKEN, headers={**JSON, "Content-Length": str(len(body))})
        yield one(f"body {body[:8]!r}", sized + body, allow={422})
    typed: dict[str, bytes | str] = {**JSON, "Content-Type": b"text/\xff", "Content-Length": "2"}
    yield one("odd type", head("POST", b"/jobs", token=TOKEN, headers=typed) + b"{}", allow={422, 400})


def _unread() -> Iterator[Hostile]:
    """A refusal before the body was read must not take the body for the next request."""
    smuggled = head(target=b"/smuggled", token=TOKEN)
    for size in (len(smuggled), 100_000, MIB):
        body = smuggled.ljust(size, b"x")
        refused = head("POST", b"/jobs", headers={"Content-Length": str(size)}) + body
        yield Hostile(
            kind="reuse after 401", segments=(refused, head(token=TOKEN)), answers=(frozenset({401}), frozenset({200}))
        )
        yield Hostile(
            kind="body behind a 401", segments=(refused[:-size],), late=(body, head(token=TOKEN)),
            answers=(frozenset({401}), frozenset({200})),
        )  # fmt: skip
