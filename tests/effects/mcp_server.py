"""An MCP stdio server with a slow tool: it charges at once and answers much later. ``python mcp_server.py URL``."""

from __future__ import annotations

import asyncio
import json
import sys
import urllib.request

from mcp.server.fastmcp import FastMCP

#: Far above the client's timeout.
SLOW_S = 60.0
server = FastMCP("bank")


@server.tool()
async def charge(invoice: str) -> str:
    """Charge an invoice."""
    body = json.dumps({"invoice": invoice, "amount": 1.0}).encode()
    await asyncio.to_thread(urllib.request.urlopen, urllib.request.Request(f"{sys.argv[1]}/charge", body))
    await asyncio.sleep(SLOW_S)
    return "charged"


if __name__ == "__main__":
    server.run("stdio")
