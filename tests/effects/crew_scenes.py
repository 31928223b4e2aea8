"""Scenes with real CrewAI crews and a scripted model; the provider counts what they do, under the scene's name.

Each scene takes ``Stage``, which says where the provider is and whether tools are guarded, and returns what the model
or the caller got.
"""

from __future__ import annotations

import json
from typing import Any

from tests.effects.guarded_scenes import GUARDED
from tests.effects.retried_scenes import TABLE
from tests.effects.stage import Stage, paying, run


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
