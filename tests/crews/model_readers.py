"""A crew without CrewAI that reads a model's stream in a process of its own, as a tool's command line would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

READER = """
import sys, urllib.request
request = urllib.request.Request(sys.argv[1], sys.argv[2].encode(), {"Content-Type": "application/json"})
with urllib.request.urlopen(request) as answer:
    answer.read()
"""


class Reader:
    """Its child has a session of its own: the end of its parent is not its end."""

    def kickoff(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Wait for the child to have read it all."""
        messages = [{"role": "user", "content": inputs["say"]}]
        body = json.dumps({"model": "any", "stream": True, "messages": messages})
        url = f"{os.environ['MODEL_URL']}/v1/chat/completions"
        subprocess.run([sys.executable, "-I", "-c", READER, url, body], check=True, start_new_session=True)
        return {"raw": "read", "token_usage": {}, "tasks_output": []}


def in_a_child() -> Reader:
    """The crew."""
    return Reader()


CREWS = {"in_a_child": in_a_child}
