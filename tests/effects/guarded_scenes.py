"""What guarded tools do in crews: every way in, and what is one effect and what is two."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable
from typing import Any

from crewai import Agent, Crew, Process, Task
from crewai.tools import BaseTool, tool

from tests.crews.scripted_llm import Prompt, ScriptedLLM, final, tool_call, use_tool
from tests.effects.stage import Stage, failing_after_tool, observed, paying, run
from worker.effect import NotApplied, effect


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
