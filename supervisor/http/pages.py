"""The dashboard's files, out of memory: a page without data that asks the API with its reader's token."""

from __future__ import annotations

from importlib import resources

from aiohttp import web

from protocol.errors import RouteUnknown

PAGE = "index.html"
#: Everything below ``/dashboard/``, and nothing else is served there.
MEDIA_TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
#: Scripts and styles of this origin alone, none inline; no sink that makes markup or code of text; no frame around it.
CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-cache",
}


class Pages:
    """Handlers of the page and of its files; both are open, since a browser asks for them before there is a token."""

    def __init__(self) -> None:
        files = [entry for entry in (resources.files("supervisor") / "dashboard").iterdir() if entry.is_file()]
        self._files = {entry.name: entry.read_bytes() for entry in files}

    async def dashboard(self, request: web.Request) -> web.StreamResponse:
        """The page."""
        return _answer(self._files[PAGE], "text/html")

    async def dashboard_file(self, request: web.Request) -> web.StreamResponse:
        """One of the files that the page names. Raises RouteUnknown."""
        name = request.match_info["file"]
        media_type = MEDIA_TYPES.get(name[name.rfind(".") :])
        if media_type is None or name not in self._files:
            raise RouteUnknown(f"no route {request.path[:200]}; see /openapi.json")
        return _answer(self._files[name], media_type)


def _answer(body: bytes, media_type: str) -> web.Response:
    return web.Response(body=body, content_type=media_type, charset="utf-8", headers=HEADERS)
