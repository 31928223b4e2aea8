"""A CrewAI model that needs no key and no network: a function says what it answers, a word at a time."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable
from typing import Any

from crewai.llms.base_llm import BaseLLM, LLMCallType, llm_call_context
from pydantic import PrivateAttr

#: Gets the whole conversation as one text, returns the answer.
Script = Callable[[str], str]


class ScriptedLLM(BaseLLM):  # type: ignore[misc]
    """Calls ``script`` in the thread that CrewAI gives it, and streams the answer with ``pace_s`` between words."""

    llm_type: str = "scripted"
    pace_s: float = 0.0
    _script: Any = PrivateAttr(default=None)

    def __init__(self, script: Script, **options: Any) -> None:
        super().__init__(model="scripted/demo", provider="scripted", **options)
        self._script = script

    def supports_function_calling(self) -> bool:
        """Tools are called in text, in the ReAct manner."""
        return False

    def supports_stop_words(self) -> bool:
        """The script stops by itself."""
        return False

    def get_context_window_size(self) -> int:
        """Enough for anything the demo says."""
        return 100_000

    def call(
        self,
        messages: Any,
        tools: Any = None,
        callbacks: Any = None,
        available_functions: Any = None,
        from_task: Any = None,
        from_agent: Any = None,
        response_model: Any = None,
    ) -> Any:
        """Answer one prompt. Blocks its thread for as long as the script does, as a slow provider would."""
        where = {"from_task": from_task, "from_agent": from_agent}
        with llm_call_context():
            self._emit_call_started_event(
                messages=messages, tools=tools, callbacks=callbacks, available_functions=available_functions, **where
            )
            answer = self._script(conversation(messages))
            if self._effective_stream():
                for word in re.findall(r"\S+\s*", answer):
                    time.sleep(self.pace_s)
                    self._emit_stream_chunk_event(chunk=word, **where)
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            self._track_token_usage_internal(usage)
            self._emit_call_completed_event(
                response=answer, call_type=LLMCallType.LLM_CALL, messages=messages, usage=usage, **where
            )
        return answer

    async def acall(self, *arguments: Any, **named: Any) -> Any:
        """The same from a coroutine."""
        return await asyncio.to_thread(self.call, *arguments, **named)


def conversation(messages: Any) -> str:
    """All that was said so far, as one text."""
    return messages if isinstance(messages, str) else "\n".join(str(message.get("content")) for message in messages)


def final(answer: str) -> str:
    """The last step of a ReAct conversation."""
    return f"Thought: I have what I need.\nFinal Answer: {answer}"


def use(tool: str, **arguments: Any) -> str:
    """A ReAct step that calls a tool."""
    return f"Thought: the tool does that.\nAction: {tool}\nAction Input: {json.dumps(arguments)}"
