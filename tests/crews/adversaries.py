"""The crew of the hostile suite: starts one attack, waits until it stands, then returns or blocks. Without CrewAI.

``inputs``: ``attack`` (a name of ``adversary_tool.ATTACKS`` or of ``ATTACKS`` here), ``cgroup`` (a directory to escape
to, or empty), the files ``heartbeat``, ``ready`` and ``fire``, and ``then``: ``return``, ``block``, or ``wait`` for the
file ``fire`` and return.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.crews import heartbeat
from tests.crews.fake_crews import LLM_ANSWER

TOOL = str(Path(__file__).with_name("adversary_tool.py"))
MCP_SERVER = str(Path(__file__).with_name("adversary_mcp_server.py"))
POLL_S = 0.002
#: In case nobody ends the job.
PATIENCE_S = 90.0


def _arguments(inputs: Mapping[str, Any]) -> list[str]:
    return [str(inputs[name]) for name in ("heartbeat", "ready", "fire", "cgroup")]


def _run_tool(attack: str, inputs: Mapping[str, Any]) -> None:
    command = [sys.executable, "-I", "-S", TOOL, attack, *_arguments(inputs)]
    subprocess.Popen(command, stdin=subprocess.DEVNULL)
    _wait_for(inputs["ready"])


def _wait_for(path: str) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while not os.path.exists(path) and time.monotonic() < give_up:
        time.sleep(POLL_S)


def _end(inputs: Mapping[str, Any]) -> None:
    if inputs["then"] == "block":
        time.sleep(PATIENCE_S)
    if inputs["then"] == "wait":
        _wait_for(inputs["fire"])


def tool(inputs: Mapping[str, Any]) -> None:
    """An attack of a process that the worker starts."""
    _run_tool(inputs["attack"], inputs)
    _end(inputs)


def held_pipe(inputs: Mapping[str, Any]) -> None:
    """A grandchild of the worker has all its descriptors, and keeps them after the worker's end."""
    heartbeat.detach(str(inputs["heartbeat"]))
    Path(inputs["ready"]).touch()
    _end(inputs)


def held_gil(inputs: Mapping[str, Any]) -> None:
    """A thread that never gives the GIL back: in the worker, or where it must return, in a process of its own."""
    if inputs["then"] == "return":
        return tool(inputs)
    _run_tool("plain_child", {**inputs, "ready": f"{inputs['ready']}-child"})

    def hold() -> None:
        Path(inputs["ready"]).touch()
        sum(range(10**18))

    threading.Thread(target=hold, daemon=True).start()
    return _end(inputs)


def mcp_server(inputs: Mapping[str, Any]) -> None:
    """A server that the MCP SDK starts in a session of its own, and a daemon that a tool of that server leaves."""
    import anyio
    from mcp import ClientSession
    from mcp.client.stdio import StdioServerParameters, stdio_client

    async def use() -> None:
        program = StdioServerParameters(command=sys.executable, args=[MCP_SERVER, *_arguments(inputs)])
        async with stdio_client(program) as (read, write), ClientSession(read, write) as session:
            await session.initialize()
            await session.call_tool("daemonise", {})
            await anyio.to_thread.run_sync(_wait_for, inputs["ready"])
            if inputs["then"] == "block":
                await anyio.sleep(PATIENCE_S)

    anyio.run(use)


ATTACKS: dict[str, Callable[[Mapping[str, Any]], None]] = {
    "held_pipe": held_pipe,
    "held_gil": held_gil,
    "mcp_server": mcp_server,
}


class Adversary:
    """Runs ``inputs.attack``."""

    def __init__(self) -> None:
        self._heartbeats = -1

    def kickoff(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        # Kept open, so that the worker itself can be told from outside by the path.
        self._heartbeats = os.open(inputs["heartbeat"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        ATTACKS.get(inputs["attack"], tool)(inputs)
        return LLM_ANSWER


CREWS: dict[str, Callable[[], Any]] = {"adversary": Adversary}
