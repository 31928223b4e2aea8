"""Plays scenes, every play in a process of its own: ``python -m tests.effects.crew_child PLAY...``.

A PLAY is JSON: ``out``, ``url``, ``ledger`` (null: CrewAI as it is, without a guard), ``scenes``, ``home``, and
``after``, whether it waits for the plays before it. CrewAI is imported once; the processes are forked from one that has
run nothing. What the scenes returned is written to ``out`` as one JSON object.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

from tests.effects.crew_scenes import SCENES, as_json
from tests.effects.stage import Stage
from worker.effect import effect

ACTION = "act"
POLICIES = {"Third Party": {"policy": "once"}, "bank_charge": {"key": ("invoice",)}}


def perform(play: dict[str, Any]) -> NoReturn:
    """Play the scenes one after the other; one that fails leaves its traceback."""
    status = 1
    try:
        os.environ.update(HOME=play["home"], CREWAI_STORAGE_DIR=play["home"])
        os.chdir(play["home"])
        guarded = play["ledger"] is not None
        if guarded:
            effect.use_ledger(play["ledger"], action=ACTION, tools=POLICIES)
        played: dict[str, Any] = {}
        for name in play["scenes"]:
            try:
                played[name] = as_json(SCENES[name](Stage(name, play["url"], guarded=guarded)))
            except Exception:  # noqa: BLE001 - the test shows it
                played[name] = {"failed": traceback.format_exc()}
        Path(play["out"]).write_text(json.dumps(played), encoding="utf-8")
        status = 0
    except BaseException:  # noqa: BLE001 - the end of a forked process
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main(plays: list[dict[str, Any]]) -> int:
    """Fork the plays. Returns the worst exit status."""
    worst, running = 0, 0
    for play in plays:
        while play["after"] and running:
            worst, running = max(worst, os.waitstatus_to_exitcode(os.wait()[1])), running - 1
        if os.fork() == 0:
            perform(play)
        running += 1
    for _ in range(running):
        worst = max(worst, os.waitstatus_to_exitcode(os.wait()[1]))
    return worst


if __name__ == "__main__":
    sys.exit(main([json.loads(play) for play in sys.argv[1:]]))
