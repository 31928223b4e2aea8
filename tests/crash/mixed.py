"""A small load of every kind at once, for one crash or one failed write in the middle of it."""

from __future__ import annotations

import contextlib
import http.client
import sqlite3
import subprocess
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from protocol.effects import EffectKey
from tests.crash.load import Action
from tests.crash.trial import STATUS_OF_ANSWER, Trial
from tests.support import procs, scripts
from tests.support.client import Client
from tests.support.effects import key_of

JOIN_S = 60.0
FORGET_S = 5.0
#: A server that cannot write refuses so; the client may ask again.
REFUSED = frozenset({503, 507})
CHUNKS = 12
#: Effects of one payer.
PAYMENTS = 4


class Mixed:
    """One load on a trial's server. ``faults``: what clients saw that even a failing disk or worker does not allow."""

    def __init__(self, trial: Trial, label: str) -> None:
        self._trial = trial
        self._client: Client = trial.client()
        self.instant = self._action(label, "instant")
        self.talking = self._action(label, "talking", chunks=CHUNKS, every_s=0.002)
        self.daemon = self._action(label, "daemon", heartbeat=str(trial.heartbeats / label))
        self.sleeper = self._action(label, "sleeper")
        self.acts = trial.server.directory / f"{label}-acts"
        self._keys = [key_of(f"{label}-{number}") for number in range(PAYMENTS)]
        self.paying = self._action(label, "paying", steps=self._steps())
        #: Claims and says nothing more, until somebody ends it.
        self.held = key_of(f"{label}-held")
        self.holder = self._action(f"{label}-holder", "paying", steps=[scripts.claim(self.held), scripts.SLEEP])
        artifact = {"n_iterations": 1, "artifact_name": f"{label}.pkl"}
        self.trained = Action(f"{label}-trained", "trainee", artifact, operation="train")
        #: Status of the answer to the archive of ``instant``; 0: it was sent, and nobody answered.
        self.archived: int | None = None
        self.faults: list[str] = []

    def _action(self, label: str, crew_id: str, **inputs: Any) -> Action:
        action_id = f"{label}-{crew_id}"
        return Action(action_id, crew_id, {"action": action_id, **inputs})

    def _steps(self) -> list[scripts.Step]:
        return [
            step
            for key in self._keys
            for step in (
                scripts.claim(key),
                {"do": "act", "path": str(self.acts), "text": key.key_id},
                scripts.settle(key),
            )
        ]

    @property
    def actions(self) -> list[Action]:
        """Everything that was to be started."""
        return [self.instant, self.talking, self.daemon, self.sleeper, self.trained, self.paying, self.holder]

    def run(self) -> None:
        """Send it all at once and return when everything is answered or cut off."""
        scripts = (
            self._start_and_archive,
            lambda: self._read(self.talking),
            lambda: self._read(self.daemon),
            self._cancel,
            lambda: self._start(self.trained),
            lambda: self._start(self.paying),
        )
        threads = [threading.Thread(target=self._guard, args=(script,), daemon=True) for script in scripts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(JOIN_S)
            if thread.is_alive():
                self.faults.append("a client was not answered")

    def _guard(self, script: Callable[[], object]) -> None:
        try:
            script()
        except (OSError, http.client.HTTPException, AssertionError) as error:
            # A dead server cuts its answers off; a living one never does.
            refused = any(str(error).startswith(f"status {status}, not 200") for status in REFUSED)
            if not refused and self._trial.server.process.poll() is None and not self._dies():
                self.faults.append(f"{script}: {error!r}")

    def _dies(self) -> bool:
        """Whether the server is ending just now: a client notices before the parent can reap it."""
        try:
            self._trial.server.process.wait(1.0)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _start(self, action: Action) -> bool:
        answer = action.start(self._client)
        if answer.status not in STATUS_OF_ANSWER:
            action.answers.remove(answer)
            if answer.status not in REFUSED:
                self.faults.append(f"{action.action_id} was answered {answer.status} {answer.body[:300]!r}")
        return answer.status == 200

    def _start_and_archive(self) -> None:
        if self._start(self.instant):
            self.archived = 0
            answer = self._client.archive(self.instant.action_id)
            self.archived = answer.status
            if answer.status not in REFUSED | {200}:
                self.faults.append(f"the archive was answered {answer.status} {answer.body[:300]!r}")

    def _read(self, action: Action) -> None:
        with action.stream(self._client) as stream:
            stream.rest()

    def _cancel(self) -> None:
        with self.sleeper.stream(self._client) as stream:
            stream.next()
            answer = self.sleeper.cancel(self._client)
            if answer.status not in REFUSED | {200}:
                self.faults.append(f"the cancel was answered {answer.status} {answer.body[:300]!r}")
            stream.rest()

    def check(self) -> list[str]:
        """Let the trial check the server as it is now, and check what the trial knows nothing of."""
        client, action = self._trial.client(), self.instant
        found = client.get(action.action_id).status
        gone = found == 404 and self.archived is not None
        if self.archived == 200 and not gone:
            self.faults.append(f"{action.action_id} was archived, and is shown with {found}")
        self._trial.check([other for other in self.actions if not (gone and other is action)])
        executed = self._trial.executions()[action.action_id]
        repeat = client.start(action.action_id, action.crew_id, input=action.input)
        if gone and repeat.status != 410:
            self.faults.append(f"a repeat of the archived {action.action_id} was answered {repeat.status}")
        if (gone or self.archived is not None) and self._trial.executions()[action.action_id] != executed:
            self.faults.append(f"a repeat of {action.action_id} executed again")
        self._check_chunks(client)
        self._check_effects(client)
        self._check_files()
        return self.faults + self._trial.violations

    def _check_chunks(self, client: Client) -> None:
        """A job that completed has every event that its crew made."""
        if not self.talking.admitted:
            return
        events = client.events(self.talking.action_id).expect(200)["events"]
        if events[-1]["event"] == "completed" and len(events) != CHUNKS + 2:
            self.faults.append(f"{self.talking.action_id} completed with {len(events) - 2} of {CHUNKS} chunks")

    def _check_effects(self, client: Client) -> None:
        """Nothing is claimed any more, what a worker was told is settled, and no repeat makes an effect twice."""
        states = {key.key_id: self._state(client, key) for key in [*self._keys, self.held]}
        if "claimed" in states.values() or (self.holder.admitted and states[self.held.key_id] == "settled"):
            self.faults.append(f"effects of jobs that have ended are {states}")
        for answer in self.paying.answers:
            said = answer.json()["answers"] if answer.status == 200 else []
            for key, noted in zip(self._keys, said[1::2], strict=answer.status == 200):
                if noted["type"] == "effect_noted" and states[key.key_id] != "settled":
                    self.faults.append(f"the settlement of {key.key_id} was noted, and it is {states[key.key_id]}")
        again = f"{self.paying.action_id}-again"
        client.start(again, "paying", input={"action": again, "steps": self._steps()}).expect(200)
        acts = Counter(self.acts.read_text(encoding="ascii").split() if self.acts.exists() else [])
        if any(count > 1 for count in acts.values()):
            self.faults.append(f"effects were made {acts} times")
        for key in self._keys:
            state = self._state(client, key)
            if state not in ("settled", "unknown") or (state == "settled" and not acts[key.key_id]):
                self.faults.append(f"effect {key.key_id} was made {acts[key.key_id]} times and is {state}")

    def _state(self, client: Client, key: EffectKey) -> str | None:
        answer = scripts.effect(client, key)
        return answer.json()["state"] if answer.status == 200 else None

    def _check_files(self) -> None:
        """Nothing is kept of what was archived, though removing it may take a restart some time."""
        logs = self._trial.server.state_file.parent / "work" / "logs"
        rows = retained_rows(self._trial.server.state_file)
        with contextlib.suppress(AssertionError):
            procs.wait_until(lambda: {path.stem for path in logs.iterdir()} <= rows, FORGET_S, "")
            return
        self.faults.append(f"logs {sorted({path.stem for path in logs.iterdir()} - rows)} are of no retained job")


def retained_rows(journal: Path) -> set[str]:
    """Rows of all jobs, straight from the file. Only for a journal that has an owner."""
    with contextlib.closing(sqlite3.connect(f"{journal.as_uri()}?mode=ro", uri=True)) as connection:
        return {str(row) for (row,) in connection.execute("SELECT row FROM jobs")}
