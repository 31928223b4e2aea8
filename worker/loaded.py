"""What of CrewAI this process has loaded. Asking never imports it, so crews that do not need it do not pay for it."""

from __future__ import annotations

import sys
from typing import Any


def module(name: str) -> Any | None:
    """The module ``name`` if something has imported it, else None."""
    return sys.modules.get(name)


def is_crewai_crew(value: object) -> bool:
    """Whether ``value`` is an instance of ``crewai.Crew`` (and not only something that quacks like one)."""
    loaded = module("crewai.crew")
    return loaded is not None and isinstance(value, loaded.Crew)


def is_crewai_stream(value: object) -> bool:
    """Whether ``value`` is a streaming output of CrewAI, whose chunks also travel as bus events."""
    loaded = module("crewai.types.streaming")
    return loaded is not None and isinstance(value, loaded.StreamingOutputBase)


def is_crewai_chunk(value: object) -> bool:
    """Whether ``value`` is a chunk of such a streaming output."""
    loaded = module("crewai.types.streaming")
    return loaded is not None and isinstance(value, loaded.StreamChunk)
