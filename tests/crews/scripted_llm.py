"""A CrewAI LLM and an embedder that need no network: a function decides what the model says."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy
from chromadb.api.types import EmbeddingFunction
from crewai.llms.base_llm import BaseLLM, LLMCallType, llm_call_context
from crewai.rag.embeddings.providers.custom.embedding_callable import CustomEmbeddingFunction
from pydantic import PrivateAttr

#: What train's evaluator and test's evaluator want to hear.
SUGGESTIONS = json.dumps({"suggestions": ["be brief"], "quality": 8.0, "final_summary": "be brief"})
QUALITY = json.dumps({"quality": 9.0})


@dataclass(frozen=True)
class Prompt:
    """One call of the model. ``calls`` counts the calls of this LLM object, from 0."""

    calls: int
    messages: Any
    tools: tuple[str, ...]
    response_model: Any

    @property
    def text(self) -> str:
        """All messages as one text, to search in."""
        return json.dumps(self.messages, default=str)

    def observed(self, result: str) -> bool:
        """Whether a tool has answered ``result`` in this conversation."""
        return f"Observation: {result}" in self.text

    def number(self, pattern: str, default: float) -> float:
        """The number that ``pattern`` captures from the messages, else ``default``."""
        found = re.search(pattern, self.text)
        return float(found.group(1)) if found else default


#: Answers a prompt: text, or native tool calls as made by tool_call().
Script = Callable[[Prompt], str | list[dict[str, Any]]]


class ScriptedLLM(BaseLLM):
    """Says what ``script`` says, in stream chunks of ``chunk_size`` characters; counts ``tokens`` for every call."""

    llm_type: str = "scripted"
    native_tools: bool = False
    chunk_size: int = 8
    tokens: int = 10
    _script: Any = PrivateAttr(default=None)
    _calls: int = PrivateAttr(default=0)

    def __init__(self, script: Script, **options: Any) -> None:
        super().__init__(**({"model": "scripted/offline", "provider": "scripted"} | options))
        self._script = script

    def supports_function_calling(self) -> bool:
        return self.native_tools

    def supports_stop_words(self) -> bool:
        return False

    def get_context_window_size(self) -> int:
        return 1_000_000

    def get_input_tokens_count(self, *arguments: Any, **named: Any) -> int:
        return 1

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
        source = {"from_task": from_task, "from_agent": from_agent}
        with llm_call_context():
            self._emit_call_started_event(
                messages=messages, tools=tools, callbacks=callbacks, available_functions=available_functions, **source
            )
            try:
                answer = self._answer(messages, tools, response_model)
                self._stream(answer, source)
            except Exception as error:
                self._emit_call_failed_event(error=str(error), **source)
                raise
            usage = {"prompt_tokens": self.tokens - 1, "completion_tokens": 1, "total_tokens": self.tokens}
            self._track_token_usage_internal(usage)
            kind = LLMCallType.LLM_CALL if isinstance(answer, str) else LLMCallType.TOOL_CALL
            self._emit_call_completed_event(response=answer, call_type=kind, messages=messages, usage=usage, **source)
            if response_model is not None and isinstance(answer, str):
                return self._validate_structured_output(answer, response_model)
            return answer

    async def acall(self, *arguments: Any, **named: Any) -> Any:
        return await asyncio.to_thread(self.call, *arguments, **named)

    def _answer(self, messages: Any, tools: Any, response_model: Any) -> Any:
        names = tuple(tool["function"]["name"] for tool in tools or ())
        prompt = Prompt(calls=self._calls, messages=messages, tools=names, response_model=response_model)
        self._calls += 1
        return _framework_answer(prompt) or self._script(prompt)

    def _stream(self, answer: Any, source: dict[str, Any]) -> None:
        if not self._effective_stream():
            return
        for piece in _pieces(answer, self.chunk_size):
            self._emit_stream_chunk_event(**piece, **source)


def _pieces(answer: Any, size: int) -> Iterable[dict[str, Any]]:
    if isinstance(answer, str):
        return ({"chunk": answer[at : at + size]} for at in range(0, len(answer), size))
    return (
        {"chunk": "", "call_type": LLMCallType.TOOL_CALL, "tool_call": call | {"index": at}}
        for at, call in enumerate(answer)
    )


def _framework_answer(prompt: Prompt) -> str | None:
    """What CrewAI itself asks: a score in test, suggestions in train, the analysis of a memory."""
    if prompt.response_model is not None and prompt.response_model.__module__.startswith("crewai."):
        return _fill(prompt.response_model)
    if "human-feedback and improved output" in prompt.text or "final_summary" in prompt.text:
        return SUGGESTIONS
    if "Task Execution Evaluator" in prompt.text:
        return final(QUALITY)
    return None


def _fill(model: Any) -> str:
    """The smallest JSON object that ``model`` accepts, for the kinds of fields that CrewAI's own models have."""
    names = set(model.model_fields)
    if names == {"quality"}:
        return QUALITY
    if "final_summary" in names:
        return SUGGESTIONS
    kinds: tuple[tuple[str, Any], ...] = (("list", []), ("dict", {}), ("float", 0.5), ("int", 1), ("bool", False))
    made = {
        name: next((value for kind, value in kinds if kind in str(field.annotation)), "text")
        for name, field in model.model_fields.items()
        if field.is_required()
    }
    return json.dumps(made)


def final(text: str) -> str:
    """The end of a ReAct conversation."""
    return f"Thought: I now can give a great answer\nFinal Answer: {text}"


def use_tool(name: str, **arguments: Any) -> str:
    """A step of a ReAct conversation."""
    return f"Thought: a tool would do\nAction: {name}\nAction Input: {json.dumps(arguments)}"


def tool_call(name: str, **arguments: Any) -> dict[str, Any]:
    """A native tool call."""
    return {"id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


class WordEmbedder(CustomEmbeddingFunction, EmbeddingFunction):  # type: ignore[misc]
    """Bag-of-words vectors. CrewAI's check and chromadb's check each want their own base class."""

    DIMENSIONS = 64

    def __init__(self, *arguments: Any, **named: Any) -> None:
        pass

    def __call__(self, input: Any) -> Any:
        return [self._vector(str(text)) for text in ([input] if isinstance(input, str) else input)]

    def _vector(self, text: str) -> Any:
        vector: Any = numpy.zeros(self.DIMENSIONS, dtype=numpy.float32)
        for word in re.findall(r"\w+", text.lower()):
            vector[int(hashlib.sha256(word.encode()).hexdigest(), 16) % self.DIMENSIONS] += 1.0
        norm = numpy.linalg.norm(vector)
        return vector / norm if norm else vector + 0.125

    @staticmethod
    def name() -> str:
        return "words64"

    def get_config(self) -> dict[str, Any]:
        return {}

    @staticmethod
    def build_from_config(config: dict[str, Any]) -> WordEmbedder:
        return WordEmbedder()


EMBEDDER = {"provider": "custom", "config": {"embedding_callable": WordEmbedder}}
