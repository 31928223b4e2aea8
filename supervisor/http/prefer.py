"""The Prefer header (RFC 7240): respond-async and wait."""

from __future__ import annotations

import msgspec
from aiohttp import web

#: Longest wait that a caller may ask for, seconds.
MAX_WAIT_S = 3600.0
APPLIED_HEADER = "Preference-Applied"


class Preferences(msgspec.Struct, frozen=True, kw_only=True):
    """What a caller prefers; ``wait_s`` in seconds. What cannot be read is ignored, as the RFC asks."""

    respond_async: bool = False
    wait_s: float | None = None


def preferences(request: web.Request) -> Preferences:
    """Read every Prefer header of a request."""
    respond_async, wait_s = False, None
    for header in request.headers.getall("Prefer", []):
        for item in header.split(","):
            name, _, value = item.split(";")[0].partition("=")
            name, value = name.strip().lower(), value.strip().strip('"')
            if name == "respond-async":
                respond_async = True
            elif name == "wait" and value.isascii() and value.isdigit() and len(value) <= 9:
                wait_s = min(float(value), MAX_WAIT_S)
    return Preferences(respond_async=respond_async, wait_s=wait_s)
