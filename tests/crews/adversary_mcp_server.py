"""An MCP stdio server whose one tool leaves a daemon behind; its arguments are those of the adversary's tool."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from mcp.server.fastmcp import FastMCP

TOOL = str(Path(__file__).with_name("adversary_tool.py"))
server = FastMCP("adversary")


@server.tool()
def daemonise() -> str:
    """Leave a process behind that has a session of its own and no living parent."""
    subprocess.run([sys.executable, "-I", "-S", TOOL, "double_fork", *sys.argv[1:]], check=True, timeout=60)
    return "done"


if __name__ == "__main__":
    server.run("stdio")
