"""Whether answers are among those that the server's own OpenAPI document declares."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from functools import cache
from typing import Any

import jsonschema
import jsonschema.protocols

from protocol import canonical
from tests.support.client import Answer, Client

#: Answers to requests that meet no route, by status, with the problem code; they belong to no path's declaration.
UNROUTED = {404: "route_unknown", 405: "method_not_allowed"}
PROBLEM = "application/problem+json"


class Undeclared(AssertionError):
    """An answer that the document does not have; the message says what of it."""


class Declared:
    """Checks answers against one document, and counts what it saw.

    ``strict``: an object with a field that its schema does not name is an error too.
    """

    def __init__(self, document: Mapping[str, Any], *, strict: bool = True) -> None:
        self.document = _closed(document) if strict else document
        self._paths = [(_pattern(path), path) for path in sorted(document["paths"], key=lambda path: path.count("{"))]
        self._validator = cache(self._make_validator)
        #: Answers by (METHOD, path of the document, status).
        self.seen: Counter[tuple[str, str, int]] = Counter()

    @classmethod
    def of(cls, client: Client) -> Declared:
        """The document of a running server."""
        return cls(client.request("GET", "/openapi.json").expect(200))

    def path_of(self, target: str) -> str | None:
        """The document's path that a request target is of, None if it meets no route."""
        path = target.partition("?")[0]
        return next((declared for pattern, declared in self._paths if pattern.fullmatch(path)), None)

    def check(
        self, method: str, target: str, status: int, content_type: str, body: bytes | None, headers: Any = None
    ) -> None:
        """Check one answer; ``body`` None leaves it out (a stream). Raises Undeclared."""
        where = f"{method} {target[:200]} answered {status} {content_type}"
        path = self.path_of(target)
        operation = self.document["paths"].get(path, {}).get(method.lower())
        if operation is None:
            self._check_unrouted(where, status, body)
            return
        response = operation["responses"].get(str(status))
        if response is None:
            raise Undeclared(f"{where}: {path} declares {', '.join(operation['responses'])}; {body!r:.500}")
        media_type = content_type.partition(";")[0].strip().lower()
        content = response["content"].get(media_type)
        if content is None:
            raise Undeclared(f"{where}: declared are {', '.join(response['content'])}; {body!r:.500}")
        for name, header in response["headers"].items():
            if headers is not None and header["required"] and name.lower() not in headers:
                raise Undeclared(f"{where} without the header {name}")
        if body is not None and media_type.endswith("json"):
            self._check_body(where, (path, method.lower(), str(status), media_type), body)
        self.seen[method, str(path), status] += 1

    def answer(self, method: str, target: str, answer: Answer) -> Answer:
        """``check`` of an Answer; returns it."""
        content_type = answer.headers.get("content-type", "")
        self.check(method, target, answer.status, content_type, answer.body, answer.headers)
        return answer

    def _check_unrouted(self, where: str, status: int, body: bytes | None) -> None:
        if status in {307, 401}:
            return
        if status not in UNROUTED or (body and canonical.parse(body)["code"] != UNROUTED[status]):
            raise Undeclared(f"{where}, and no route of the document is there; {body!r:.500}")

    def _check_body(self, where: str, key: tuple[str | None, str, str, str], body: bytes) -> None:
        try:
            self._validator(key).validate(canonical.parse(body))
        except jsonschema.ValidationError as error:
            raise Undeclared(f"{where}: {error.message[:500]} at {error.json_path}") from None

    def _make_validator(self, key: tuple[str, str, str, str]) -> jsonschema.protocols.Validator:
        path, method, status, media_type = key
        schema = self.document["paths"][path][method]["responses"][status]["content"][media_type]["schema"]
        whole = {"components": self.document["components"], "allOf": [schema]}
        return jsonschema.Draft202012Validator(whole)


class DeclaredClient(Client):
    """A client whose every answer must be declared; streams are checked up to their headers."""

    def __init__(self, inner: Client, declared: Declared) -> None:
        super().__init__(inner.host, inner.port, token=inner.token, timeout_s=inner.timeout_s)
        self.declared = declared

    def request(
        self, method: str, path: str, *, body: Any = None, headers: Mapping[str, str | bytes] | None = None
    ) -> Answer:
        """Send one request, read the whole answer and check it. Raises Undeclared."""
        return self.declared.answer(method, path, super().request(method, path, body=body, headers=headers))


def _pattern(path: str) -> re.Pattern[str]:
    parts = re.split(r"\{[^}]*\}", path)
    return re.compile("[^/]+".join(re.escape(part) for part in parts))


def _closed(value: Any) -> Any:
    """The same document with every struct's schema closed to fields that it does not name."""
    if isinstance(value, list):
        return [_closed(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    made = {name: _closed(item) for name, item in value.items()}
    if made.get("type") == "object" and "properties" in made and "title" in made:
        made.setdefault("additionalProperties", False)
    return made
