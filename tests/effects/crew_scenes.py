"""Scenes with real CrewAI crews and a scripted model; the provider counts what they do, under the scene's name.

Each scene takes ``Stage``, which says where the provider is and whether tools are guarded, and returns what the model
or the caller got.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from crewai import Agent, Crew, Process, Task
from crewai.mcp.client import MCPClient
from crewai.mcp.transports.stdio import StdioTransport
from crewai.tools import BaseTool, tool
from crewai.tools.mcp_native_tool import MCPNativeTool
from pydantic import BaseModel

from demo.payments import provider
from tests.crews.scripted_llm import Prompt, ScriptedLLM, final, tool_call, use_tool
from worker.effect import NotApplied, effect

MCP_SERVER = Path(__file__).with_name("mcp_server.py")
Script = Callable[[Prompt], Any]


class Stage:
    """Where a scene plays. ``name`` is what the provider is charged for."""

    def __init__(self, name: str, url: str, *, guarded: bool) -> None:
        self.name, self.url, self.guarded = name, url, guarded

    def act(self, what: str = "") -> str:
        """Take effect at the provider."""
        made = provider.charge(self.url, self.name, 1.0)
        return f"charged {made['id']}{what}"

    def guard(self, **policy: Any) -> Callable[[Any], Any]:
        """The decorator, or none."""
        return effect(**policy) if self.guarded else lambda function: function

    def tool(self, *, fail: bool = False, **policy: Any) -> Any:
        """A tool ``pay`` that acts and, with ``fail``, raises then."""

        @tool("pay")
        @self.guard(**policy)
        def pay(invoice: str) -> str:
            """Pay an invoice."""
            done = self.act()
            if fail:
                raise ConnectionError("the answer was lost")
            return done

        return pay

    def crew(self, script: Script, tools: list[Any], *, native: bool = False, **task: Any) -> Crew:
        """One agent, one task."""
        llm = ScriptedLLM(script, native_tools=native)
        agent = Agent(role="Clerk", goal="pay", backstory="b", llm=llm, tools=tools, allow_delegation=False)
        return Crew(
            name=self.name,
            agents=[agent],
            tasks=[Task(name="pay", description="Pay scene {invoice}", expected_output="e", agent=agent, **task)],
        )


def paying(*, native: bool = False, calls: int = 1, name: str = "pay", **arguments: Any) -> Script:
    """Call the tool ``calls`` times at once or, in text, once; then repeat what the tool said."""

    def script(prompt: Prompt) -> Any:
        if heard := observed(prompt):
            return heard if native else final(heard)
        wanted = arguments or {"invoice": invoice_of(prompt)}
        if native:
            return [tool_call(name, **wanted) | {"id": f"call_{at}"} for at in range(calls)]
        return use_tool(name, **wanted)

    return script


def invoice_of(prompt: Prompt) -> str:
    """The invoice that the task names, which is the scene's name."""
    found = re.search(r"Pay scene (\w+)", prompt.text)
    assert found is not None, prompt.text
    return found[1]


def observed(prompt: Prompt) -> str:
    """What the last tool call of this conversation gave, empty before it."""
    if isinstance(prompt.messages, str):
        return ""
    for message in reversed(prompt.messages):
        content = str(message.get("content") or "")
        if message["role"] == "tool":
            return content
        if message["role"] == "assistant" and "Observation:" in content:
            return content.rpartition("Observation:")[2].strip().splitlines()[0]
    return ""


def failing_after_tool(script: Script, times: int = 1) -> Script:
    """The provider of the model fails once the tool has answered, ``times`` times; CrewAI enters the task again."""
    left = [times]

    def failing(prompt: Prompt) -> Any:
        if observed(prompt) and left[0]:
            left[0] -= 1
            raise RuntimeError("the model's provider failed")
        return script(prompt)

    return failing


def run(crew: Crew) -> dict[str, Any]:
    """Kick off; what came out, and the codes of the tool failures."""
    output = crew.kickoff(inputs={"invoice": crew.name})
    return {"raw": output.raw, "codes": [record.failure.code for record in output.tasks_output[0].tool_failures]}


# --- the table -------------------------------------------------------------------------------------------------------


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

# --- with the guard --------------------------------------------------------------------------------------------------


def parallel(stage: Stage) -> Any:
    """Two equal native calls at once; each begins before the other ends."""
    both = threading.Barrier(2)

    @tool("pay")
    @stage.guard()
    def pay(invoice: str) -> str:
        """Pay an invoice."""
        both.wait(30)
        return stage.act()

    return run(stage.crew(paying(native=True, calls=2), [pay], native=True))


def parallel_with_key(stage: Stage) -> Any:
    """Two equal native calls at once under one business key."""
    return run(stage.crew(paying(native=True, calls=2), [stage.tool(key="invoice")], native=True))


def reworded(stage: Stage) -> Any:
    """After the model failed it asks for the same invoice with another amount."""

    @tool("pay")
    @stage.guard(key="invoice")
    def pay(invoice: str, amount: float) -> str:
        """Pay an invoice."""
        return stage.act()

    asked: list[float] = []

    def script(prompt: Prompt) -> Any:
        if heard := observed(prompt):
            if len(asked) == 1:
                raise RuntimeError("the model's provider failed")
            return final(heard)
        asked.append(10.0 + len(asked))
        return use_tool("pay", invoice=stage.name, amount=asked[-1])

    return run(stage.crew(script, [pay]))


def persistent(stage: Stage) -> Any:
    """The model does not take no for an answer and calls four times."""

    def script(prompt: Prompt) -> Any:
        return use_tool("pay", invoice=stage.name) if prompt.calls < 4 else final("gave up")

    return run(stage.crew(script, [stage.tool(fail=True)]))


def class_tool(stage: Stage) -> Any:
    """A subclass of BaseTool."""

    class Pay(BaseTool):
        name: str = "pay"
        description: str = "Pay an invoice."

        @stage.guard()
        def _run(self, invoice: str) -> str:
            stage.act()
            raise ConnectionError("lost")

    return run(stage.crew(paying(), [Pay()]))


def undecorated_class_tool(stage: Stage) -> Any:
    """A third party's tool, guarded by a policy that names it; see crew_child."""

    class ThirdParty(BaseTool):
        name: str = "Third Party"
        description: str = "Pay an invoice."

        def _run(self, invoice: str) -> str:
            stage.act()
            raise ConnectionError("lost")

    return run(stage.crew(paying(name="third_party"), [ThirdParty()]))


def decorated_above(stage: Stage) -> Any:
    """The decorator above ``@tool``."""

    @stage.guard()
    @tool("pay")
    def pay(invoice: str) -> str:
        """Pay an invoice."""
        stage.act()
        raise ConnectionError("lost")

    return run(stage.crew(paying(), [pay]))


def async_tool(stage: Stage) -> Any:
    """A coroutine function, called in text and natively."""

    @tool("pay")
    @stage.guard(key="invoice")
    async def pay(invoice: str) -> str:
        """Pay an invoice."""
        await asyncio.to_thread(stage.act)
        raise ConnectionError("lost")

    first = run(stage.crew(paying(), [pay]))
    second = run(stage.crew(paying(native=True), [pay], native=True))
    return {"codes": first["codes"] + second["codes"]}


def async_crew(stage: Stage) -> Any:
    """``akickoff``: CrewAI runs the function in a thread without its context."""
    crew = stage.crew(paying(), [stage.tool(key="invoice")])
    output = asyncio.run(crew.akickoff(inputs={"invoice": crew.name}))
    return {"raw": output.raw, "codes": [record.failure.code for record in output.tasks_output[0].tool_failures]}


def direct_calls(stage: Stage) -> Any:
    """``run``, ``arun`` and ``invoke`` of one tool, by a script, with one business key."""

    @tool("pay")
    @stage.guard(key="invoice")
    async def pay(invoice: str) -> str:
        """Pay an invoice."""
        return await asyncio.to_thread(stage.act)

    structured = pay.to_structured_tool()
    return [
        pay.run(invoice=stage.name),
        pay.run(stage.name),
        asyncio.run(pay.arun(invoice=stage.name)),
        structured.invoke({"invoice": stage.name}),
        structured.invoke(json.dumps({"invoice": stage.name})),
        asyncio.run(structured.ainvoke({"invoice": stage.name})),
        asyncio.run(pay.func(invoice=stage.name)),
    ]


def delegated(stage: Stage) -> Any:
    """A coworker pays; then the boss's model fails, and the boss delegates once more."""
    clerk = Agent(
        role="Clerk",
        goal="pay",
        backstory="b",
        llm=ScriptedLLM(paying()),
        tools=[stage.tool()],
        allow_delegation=False,
    )
    boss_says = failing_after_tool(
        paying(name="delegate_work_to_coworker", task=f"Pay scene {stage.name}", context="now", coworker="Clerk")
    )
    boss = Agent(role="Boss", goal="g", backstory="b", llm=ScriptedLLM(boss_says), allow_delegation=True)
    task = Task(name="t", description="d {invoice}", expected_output="e", agent=boss)
    return run(Crew(name=stage.name, agents=[boss, clerk], tasks=[task], process=Process.sequential))


def two_tasks(stage: Stage) -> Any:
    """Two tasks make the same call: these are two effects."""
    crew = stage.crew(paying(), [stage.tool()])
    agent = crew.agents[0]
    again = Task(name="again", description="Pay scene {invoice} again", expected_output="e", agent=agent)
    crew.tasks = [*crew.tasks, again]
    return run(crew)


def batch(stage: Stage) -> Any:
    """Two equal items: these are two effects."""
    outputs = stage.crew(paying(), [stage.tool()]).kickoff_for_each(inputs=[{"invoice": stage.name}] * 2)
    return [output.raw for output in outputs]


def batch_async(stage: Stage) -> Any:
    """The same, gathered."""
    crew = stage.crew(paying(), [stage.tool()])
    return [output.raw for output in asyncio.run(crew.kickoff_for_each_async(inputs=[{"invoice": stage.name}] * 3))]


def batch_native_async(stage: Stage) -> Any:
    """The same, with coroutines throughout."""
    crew = stage.crew(paying(), [stage.tool()])
    return [output.raw for output in asyncio.run(crew.akickoff_for_each(inputs=[{"invoice": stage.name}] * 3))]


def iterations(stage: Stage) -> Any:
    """``test`` kicks one crew off twice: these are two effects."""
    crew = stage.crew(paying(), [stage.tool()])
    crew.test(2, ScriptedLLM(paying()), inputs={"invoice": stage.name})
    return "tested"


def kickoff_repeated(stage: Stage) -> Any:
    """A script repeats a kickoff that raised; the tool had acted."""
    crew = stage.crew(failing_after_tool(paying(), times=3), [stage.tool()])
    with contextlib.suppress(RuntimeError):
        run(crew)
    return run(crew)


def duplicate_keys_react(stage: Stage) -> Any:
    """Text with a key twice; a lenient reader would take the last."""
    text = 'Thought: t\nAction: pay\nAction Input: {"invoice": "17", "invoice": "18"}'
    return run(stage.crew(lambda prompt: final("no") if prompt.calls else text, [stage.tool()]))


def duplicate_keys_native(stage: Stage) -> Any:
    """The same in a native call."""
    call = tool_call("pay")
    call["function"]["arguments"] = '{"invoice": "17", "invoice": "18"}'
    return run(stage.crew(lambda prompt: "no" if prompt.calls else [call], [stage.tool()], native=True))


def block_in_a_tool(stage: Stage) -> Any:
    """A tool that is not guarded itself claims one effect, which is unknown the second time."""

    @tool("pay")
    def pay(invoice: str) -> str:
        """Pay an invoice."""
        with effect.claim("charge", args={"invoice": invoice}):
            stage.act()
            raise ConnectionError("lost")

    return run(stage.crew(paying(), [pay]))


def not_applied(stage: Stage) -> Any:
    """The tool says twice that nothing happened, then acts; CrewAI repeats a call that raises."""
    tried: list[str] = []

    @tool("pay")
    @stage.guard()
    def pay(invoice: str) -> str:
        """Pay an invoice."""
        tried.append(invoice)
        if len(tried) < 3:
            raise NotApplied("refused")
        return stage.act()

    return run(stage.crew(paying(), [pay]))


def usage_limit(stage: Stage) -> Any:
    """A tool that may be used once is called twice; the second call is no unknown outcome."""

    @tool("pay", max_usage_count=1)
    @stage.guard()
    def pay(invoice: str) -> str:
        """Pay an invoice."""
        return stage.act()

    pay.run(invoice=stage.name)
    return pay.run(invoice="other").reason.value


def key_as_argument(stage: Stage) -> Any:
    """The key id comes as an argument, by every way in, and the model's own is not taken."""

    @tool("pay")
    @stage.guard(key="invoice", pass_key_as="idempotency_key")
    def pay(invoice: str, idempotency_key: str) -> bool:
        """Pay an invoice."""
        if len(stage_key := idempotency_key) == 64:
            stage.act()
        return stage_key == effect.provider_key()

    structured = pay.to_structured_tool()
    numbered = [f"{stage.name}{at}" for at in range(5)]
    native = stage.crew(paying(native=True, invoice=numbered[4], idempotency_key="mine"), [pay], native=True)
    return [
        pay.run(invoice=numbered[0]),
        pay.run(numbered[1]),
        structured.invoke({"invoice": numbered[2], "idempotency_key": "mine"}),
        structured.invoke(json.dumps({"invoice": numbered[3]})),
        run(native)["raw"],
    ]


def lone_agent(stage: Stage) -> Any:
    """An agent without a crew; its kickoff raises after the tool, and the script repeats it."""
    script = failing_after_tool(paying(invoice=stage.name))
    agent = Agent(
        role="Clerk",
        goal="pay",
        backstory="b",
        llm=ScriptedLLM(script),
        tools=[stage.tool()],
        allow_delegation=False,
        max_retry_limit=0,
    )
    with contextlib.suppress(RuntimeError):
        agent.kickoff(f"Pay scene {stage.name}")
    first = agent.kickoff(f"Pay scene {stage.name}").raw
    return [first, agent.kickoff(f"Pay scene {stage.name}").raw]


def not_stored(stage: Stage) -> Any:
    """A tool without a result: the repeat is told so."""

    @tool("pay")
    @stage.guard(key="invoice")
    def pay(invoice: str) -> None:
        """Pay an invoice."""
        stage.act()

    crew = stage.crew(paying(), [pay])
    run(crew)
    return run(crew)


GUARDED: dict[str, Callable[[Stage], Any]] = {
    scene.__name__: scene
    for scene in (
        parallel,
        parallel_with_key,
        reworded,
        persistent,
        class_tool,
        undecorated_class_tool,
        decorated_above,
        async_tool,
        async_crew,
        direct_calls,
        delegated,
        two_tasks,
        batch,
        batch_async,
        batch_native_async,
        iterations,
        kickoff_repeated,
        duplicate_keys_react,
        duplicate_keys_native,
        block_in_a_tool,
        not_applied,
        usage_limit,
        key_as_argument,
        lone_agent,
        not_stored,
    )
}
def no_ledger(stage: Stage) -> Any:
    """Guarded tools in a process that names no ledger; one that only reads needs none."""
    stage = Stage(stage.name, stage.url, guarded=True)
    return {
        "refused": run(stage.crew(paying(), [stage.tool()])),
        "read": run(stage.crew(paying(), [stage.tool(policy="read")])),
    }


SCENES = {name: scene for name, (_, scene) in TABLE.items()} | GUARDED | {"no_ledger": no_ledger}


def as_json(value: Any) -> Any:
    """What a scene returned, as far as JSON can say it."""
    return json.loads(json.dumps(value, default=str))
