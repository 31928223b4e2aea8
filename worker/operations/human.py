"""Who answers when CrewAI asks a human: the input field ``feedback``, or nobody. Never standard input."""

from __future__ import annotations

import importlib
import itertools
import threading
from collections.abc import Sequence
from typing import Any

PROVIDERS = "crewai.core.providers.human_input"


class FeedbackRequired(Exception):
    """A human was asked and there is none."""


def answer_with(texts: Sequence[str]) -> None:
    """Answer CrewAI's questions with ``texts`` in order, the last one again and again; without any, raise instead.

    Applies to the calling context and to what is started from it. Imports CrewAI.
    """
    module: Any = importlib.import_module(PROVIDERS)
    lock = threading.Lock()
    answers = itertools.chain(texts, itertools.repeat(texts[-1])) if texts else None

    def answer() -> str:
        if answers is None:
            raise FeedbackRequired("a task asks for human input; there is no human behind a job")
        with lock:
            return next(answers)

    class Provider(module.SyncHumanInputProvider):  # type: ignore[misc]
        """CrewAI's own flow of feedback with another source of the text."""

        @staticmethod
        def _prompt_input(crew: Any) -> str:
            return answer()

        @staticmethod
        async def _prompt_input_async(crew: Any) -> str:
            return answer()

    module.set_provider(Provider())
