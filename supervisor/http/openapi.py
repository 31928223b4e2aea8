"""The OpenAPI 3.1 document of the route table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from protocol.api import Problem
from protocol.errors import CrewError, Unauthorized
from supervisor.http.declare import JSON, Answer, Header, Parameter, Route

PROBLEM_TYPE = "application/problem+json"
OPENAPI_VERSION = "3.1.0"
DESCRIPTION = """Starts, follows and stops CrewAI work.

Errors are problem documents (RFC 9457) with a stable `code`; docs/errors.md lists the codes. Not listed per route:
404 `route_unknown` and 405 `method_not_allowed` for requests that meet no route, 307 for a path with a slash too many,
and a plain-text 400 for bytes that are no HTTP request."""
_REFERENCE = "#/components/schemas/{name}"
_WWW_AUTHENTICATE = Header("WWW-Authenticate", str, "`Bearer`.", required=True)
_RETRY_AFTER = Header("Retry-After", int, "Seconds to wait before the same request may succeed.")


def document(routes: Sequence[Route], *, version: str) -> bytes:
    """Return the document as JSON; made of the rows and of the structs that they name, and of nothing else."""
    schemas = _Schemas(routes)
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, schemas)
    return msgspec.json.encode(
        {
            "openapi": OPENAPI_VERSION,
            "info": {"title": "crew-supervisor", "version": version, "description": DESCRIPTION},
            "security": [{"bearer": []}],
            "paths": paths,
            "components": {
                "schemas": schemas.components,
                "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
            },
        }
    )


class _Schemas:
    """The schema of every type that the rows name, structs and enums as components."""

    def __init__(self, routes: Sequence[Route]) -> None:
        bodies = [route.body for route in routes if route.body is not None]
        kinds = [Problem, *bodies, *_answer_kinds(routes), _WWW_AUTHENTICATE.kind, _RETRY_AFTER.kind]
        kinds += [parameter.kind for route in routes for parameter in route.parameters]
        schemas, self.components = msgspec.json.schema_components(kinds, ref_template=_REFERENCE)
        self._pairs = list(zip(kinds, schemas, strict=True))
        for struct in _structs(_answer_kinds(routes)):
            # What we send has every field, those with a default too.
            if not struct.__struct_config__.omit_defaults and struct not in bodies:
                self.components[struct.__name__]["required"] = list(struct.__struct_encode_fields__)

    def of(self, kind: Any) -> dict[str, Any]:
        """The schema of one of the rows' types."""
        return next(schema for known, schema in self._pairs if known == kind)


def _answer_kinds(routes: Iterable[Route]) -> list[Any]:
    answers = [answer for route in routes for answer in route.answers]
    return [answer.body for answer in answers] + [header.kind for answer in answers for header in answer.headers]


def _structs(kinds: Iterable[Any]) -> set[type[msgspec.Struct]]:
    """Every struct class in ``kinds`` and in what their fields hold."""
    found: set[type[msgspec.Struct]] = set()
    waiting: list[Any] = list(msgspec.inspect.multi_type_info(kinds))
    while waiting:
        kind = waiting.pop()
        if isinstance(kind, msgspec.inspect.StructType):
            if kind.cls not in found:
                found.add(kind.cls)
                waiting += [field.type for field in kind.fields]
        elif isinstance(kind, msgspec.inspect.UnionType):
            waiting += kind.types
        elif isinstance(kind, msgspec.inspect.CollectionType):
            waiting.append(kind.item_type)
        elif isinstance(kind, msgspec.inspect.Metadata):
            waiting.append(kind.type)
    return found


def _operation(route: Route, schemas: _Schemas) -> dict[str, Any]:
    made: dict[str, Any] = {"operationId": _operation_id(route), "summary": route.summary}
    if route.open:
        made["security"] = []
    if route.parameters:
        made["parameters"] = [_parameter(parameter, schemas) for parameter in route.parameters]
    if route.body is not None:
        made["requestBody"] = {"required": True, "content": {JSON: {"schema": schemas.of(route.body)}}}
    made["responses"] = _responses(route, schemas)
    return made


def _operation_id(route: Route) -> str:
    """The handler's name; a handler that a legacy path shares gets the word behind it."""
    name: str = route.handler.__name__
    return f"{name}_legacy" if route.path.startswith("/runs/{") else name


def _parameter(parameter: Parameter, schemas: _Schemas) -> dict[str, Any]:
    return {
        "name": parameter.name,
        "in": parameter.where,
        "required": parameter.required,
        "description": parameter.description,
        "schema": schemas.of(parameter.kind),
    }


def _responses(route: Route, schemas: _Schemas) -> dict[str, Any]:
    responses: dict[str, Any] = {}
    for answer in route.answers:
        _add_answer(responses.setdefault(str(answer.status), _empty()), answer, schemas)
    for status in sorted({error.status for error in route.all_errors}):
        errors = [error for error in route.all_errors if error.status == status]
        _add_problem(responses.setdefault(str(status), _empty()), status, errors, schemas)
    return dict(sorted(responses.items()))


def _empty() -> dict[str, Any]:
    return {"description": "", "headers": {}, "content": {}}


def _add_answer(response: dict[str, Any], answer: Answer, schemas: _Schemas) -> None:
    _describe(response, answer.description)
    response["content"][answer.media_type] = {"schema": schemas.of(answer.body)}
    for header in answer.headers:
        response["headers"][header.name] = _header(header, schemas)


def _add_problem(
    response: dict[str, Any], status: int, errors: Sequence[type[CrewError]], schemas: _Schemas
) -> None:
    for error in errors:
        _describe(response, f"`{error.code}`: {error.title}.")
    narrowed = {"status": {"const": status}, "code": {"enum": [error.code for error in errors]}}
    response["content"][PROBLEM_TYPE] = {"schema": {**schemas.of(Problem), "properties": narrowed}}
    if Unauthorized in errors:
        response["headers"][_WWW_AUTHENTICATE.name] = _header(_WWW_AUTHENTICATE, schemas)
    if any(error.retryable for error in errors):
        response["headers"][_RETRY_AFTER.name] = _header(_RETRY_AFTER, schemas)


def _describe(response: dict[str, Any], text: str) -> None:
    response["description"] = f"{response['description']} {text}".strip()


def _header(header: Header, schemas: _Schemas) -> dict[str, Any]:
    return {"description": header.description, "required": header.required, "schema": schemas.of(header.kind)}
