"""What the logs say of a job, what they never say, and how much of it is kept."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support import procs
from tests.support.registries import with_registry
from tests.support.server import Server, ServerFactory

WAIT_S = 20.0
LOG_BYTES = 4096
#: Each job prints this much, and so many of them are kept.
PRINTED, KEPT = 2000, 3
INPUT, OUTPUT, ERROR, THREAD, KEY = (f"needle-{part}" for part in ("input", "output", "error", "thread", "key"))

pytestmark = pytest.mark.timeout(180)

REGISTRY = f"""
    import logging
    import threading
    import time
    from pathlib import Path

    class Quiet:
        def kickoff(self, inputs):
            yield {{"content": inputs["prompt"]}}
            return {{"raw": "{OUTPUT}"}}

    class Failing:
        def kickoff(self, inputs):
            def fail():
                raise ValueError("{THREAD} " + inputs["prompt"])

            thread = threading.Thread(target=fail)
            thread.start()
            thread.join()
            try:
                raise KeyError("{ERROR} " + inputs["prompt"])
            except KeyError as error:
                logging.getLogger("of_a_library").exception("it goes on")
                raise RuntimeError(f"again {{error}}") from error

    class Printing:
        def kickoff(self, inputs):
            print("x" * {PRINTED - len("stdout ") - 1}, flush=True)
            while "until" in inputs and not Path(inputs["until"]).exists():
                time.sleep(0.01)
            return {{"raw": "printed"}}

    CREWS = {{"quiet": Quiet, "failing": Failing, "printing": Printing}}
"""


def captured(server: Server, action_id: str) -> str:
    """The captured output of a job."""
    return str(server.client().request("GET", f"/jobs/{action_id}/evidence").expect(200)["log_tail"])


def run_needles(server: Server) -> None:
    """A job that goes well and one that fails, with words in all places that are never logged."""
    client = server.client()
    client.start("well", "quiet", input={"prompt": INPUT}, key=KEY).expect(200)
    client.start("ill", "failing", input={"prompt": INPUT}, key=KEY).expect(502)


def test_every_line_says_which_process_and_which_job(make_server: ServerFactory, tmp_path: Path) -> None:
    server = with_registry(make_server, tmp_path, REGISTRY).start()
    run_needles(server)
    health = server.client().health().json()
    constants = {name: health[name] for name in ("version", "instance_id", "config_digest", "registry_digest")}
    request_digest = server.client().request("GET", "/jobs/well/evidence").json()["request_hash"]
    about = {
        "action_id": "well",
        "crew_id": "quiet",
        "operation": "run",
        "request_digest": request_digest,
        "key_digest": hashlib.sha256(KEY.encode()).hexdigest(),
    }
    lines = {name: server.wait_log(name, action_id="well") for name in ("job_admitted", "job_started", "job_ended")}
    for line in lines.values():
        assert (constants | about).items() <= line.items()
    assert "sequence" not in lines["job_admitted"]
    assert (lines["job_started"]["sequence"], lines["job_ended"]["sequence"]) == (0, 2)
    assert server.wait_log("listening")["instance_id"] == health["instance_id"]


def test_no_log_has_inputs_outputs_keys_or_texts_of_exceptions(make_server: ServerFactory, tmp_path: Path) -> None:
    server = with_registry(make_server, tmp_path, REGISTRY).start()
    run_needles(server)
    server.wait_log("job_ended", action_id="ill")
    log = captured(server, "ill")
    for name in ("ValueError", "KeyError", "RuntimeError"):
        assert f"{name}, its text is left out" in log
    assert "at my_registry.py:" in log
    for text in (log, captured(server, "well"), server.log_file.read_text(encoding="utf-8")):
        assert "needle-" not in text


def test_texts_of_exceptions_are_in_the_jobs_own_log_where_that_is_wanted(
    make_server: ServerFactory, tmp_path: Path
) -> None:
    server = with_registry(make_server, tmp_path, REGISTRY, log_exceptions=True).start()
    run_needles(server)
    server.wait_log("job_ended", action_id="ill")
    log = captured(server, "ill")
    assert f"{THREAD} {INPUT}" in log
    assert f"{ERROR} {INPUT}" in log
    assert "needle-" not in captured(server, "well")
    assert "needle-" not in server.log_file.read_text(encoding="utf-8")


def logs(server: Server) -> dict[str, int]:
    """Sizes of the logs that are kept."""
    return {path.stem: path.stat().st_size for path in Path(server.directory, "state", "work", "logs").glob("*.log")}


def test_the_logs_that_ended_first_go_when_all_are_too_much(make_server: ServerFactory, tmp_path: Path) -> None:
    server = with_registry(make_server, tmp_path, REGISTRY, log_bytes=LOG_BYTES, log_total_bytes=KEPT * PRINTED).start()
    client, until = server.client(), tmp_path / "until"
    client.start("first", "printing", input={"until": str(until)}, headers={"Prefer": "respond-async"}).expect(202)
    procs.wait_until(lambda: logs(server).get("1") == PRINTED, WAIT_S, "the first job has printed")
    for number in range(2, 6):
        client.start(f"job-{number}", "printing").expect(200)
    removed = server.wait_log("job_logs_removed")
    assert (removed["count"], removed["bytes"]) == (2, 2 * PRINTED), "to nine tenths of the bound"
    assert set(logs(server)) == {"1", "4", "5"}, "the first has not ended"
    assert captured(server, "job-2") == ""
    assert client.get("job-2").expect(200)["status"] == "completed"
    until.touch()
    procs.wait_until(lambda: client.get("first").json()["phase"] == "done", WAIT_S, "the first job ends")
    client.start("job-6", "printing").expect(200)
    server.wait_log("job_logs_removed", skip=server.log_lines().index(removed) + 1)
    assert set(logs(server)) == {"1", "6"}, "it was admitted first and ended late"


def test_a_lower_bound_holds_after_a_restart(make_server: ServerFactory, tmp_path: Path) -> None:
    server = with_registry(make_server, tmp_path, REGISTRY, log_total_bytes=1 << 20).start()
    for number in range(1, 5):
        server.client().start(f"job-{number}", "printing").expect(200)
    assert len(logs(server)) == 4
    server.settings["log_total_bytes"] = 2 * LOG_BYTES // 2
    server.restart()
    server.wait_log("job_logs_removed")
    assert set(logs(server)) == {"4"}


def test_a_log_goes_into_the_archive_with_its_job(make_server: ServerFactory, tmp_path: Path) -> None:
    server = with_registry(make_server, tmp_path, REGISTRY).start()
    server.client().start("printed", "printing").expect(200)
    server.client().archive("printed").expect(200)
    (line,) = server.state_file.with_name("journal.db.archive.jsonl").read_text(encoding="utf-8").splitlines()
    archived: dict[str, Any] = json.loads(line)
    assert (archived["record"]["action_id"], archived["log_omitted_bytes"]) == ("printed", 0)
    assert archived["log"] == f"stdout {'x' * (PRINTED - len('stdout ') - 1)}\n"
    assert logs(server) == {}
