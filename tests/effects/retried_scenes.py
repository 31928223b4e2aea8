"""Six ways in which CrewAI repeats a call that took effect, each with and without the guard."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from crewai.mcp.client import MCPClient
from crewai.mcp.transports.stdio import StdioTransport
from crewai.tools.mcp_native_tool import MCPNativeTool
from pydantic import BaseModel

from tests.effects.stage import Stage, failing_after_tool, paying, run

MCP_SERVER = Path(__file__).with_name("mcp_server.py")


def react_raises(stage: Stage) -> Any:
    """The body acts and raises; the model calls in text."""
    return run(stage.crew(paying(), [stage.tool(fail=True)]))


def native_raises(stage: Stage) -> Any:
    """The body acts and raises; the model calls natively."""
    return run(stage.crew(paying(native=True), [stage.tool(fail=True)], native=True))


def react_model_fails(stage: Stage) -> Any:
    """The model fails after the tool; the task is entered again."""
    return run(stage.crew(failing_after_tool(paying()), [stage.tool()]))


def native_model_fails(stage: Stage) -> Any:
    """The same with native calls."""
    return run(stage.crew(failing_after_tool(paying(native=True)), [stage.tool()], native=True))


def guardrail(stage: Stage) -> Any:
    """A guardrail refuses the first output."""
    seen: list[Any] = []

    # CrewAI reads the annotation of the return value, and this module's are text.
    def once(output: Any):  # type: ignore[no-untyped-def]
        seen.append(output)
        return (False, "again") if len(seen) == 1 else (True, output)

    return run(stage.crew(paying(), [stage.tool()], guardrail=once))


class Charge(BaseModel):
    invoice: str


def mcp_tool(stage: Stage) -> MCPNativeTool:
    """CrewAI's own MCP tool, its client and a real server; only the timeout is shorter than by default."""

    def client() -> MCPClient:
        transport = StdioTransport(command=sys.executable, args=[str(MCP_SERVER), stage.url])
        return MCPClient(transport=transport, execution_timeout=1)

    schema = {"description": "Charge an invoice.", "args_schema": Charge}
    return MCPNativeTool(client_factory=client, tool_name="charge", tool_schema=schema, server_name="bank")


def slow_mcp(stage: Stage) -> Any:
    """An MCP server is slower than the client's timeout."""
    script = paying(native=True, name="bank_charge", invoice=stage.name)
    return run(stage.crew(script, [mcp_tool(stage)], native=True))


TABLE: dict[str, tuple[str, Callable[[Stage], Any]]] = {
    "react_raises": ("ReAct call whose body acts and raises", react_raises),
    "native_raises": ("native call, same tool", native_raises),
    "react_model_fails": ("model fails after the tool, ReAct", react_model_fails),
    "native_model_fails": ("model fails after the tool, native", native_model_fails),
    "guardrail": ("guardrail retry", guardrail),
    "slow_mcp": ("MCP call slower than its timeout", slow_mcp),
}
