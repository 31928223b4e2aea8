"""Baseline of health: a server that calls factories in its own event loop. Prints its port."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from aiohttp import web

from bench.fakes import CREWS


async def health(request: web.Request) -> web.Response:
    """Nothing but ok."""
    return web.json_response({"status": "ok"})


async def factory(request: web.Request) -> web.Response:
    """Build a crew here."""
    CREWS["blocking_factory"]()
    return web.json_response({})


async def serve() -> None:
    """Until killed."""
    app = web.Application()
    app.add_routes([web.get("/health", health), web.post("/factory", factory)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host = runner.addresses[0]
    print(host[1], flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        asyncio.run(serve())
