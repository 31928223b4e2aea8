"""``crew-supervisor effects`` as a process, against a running server."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import scripts
from tests.support.effects import key_of
from tests.support.scripts import claim, make_unknown, perform, settle
from tests.support.server import Server
from tests.unit.test_cli import run

PAID, LOST, WRONG = key_of("paid"), key_of("lost"), key_of("wrong")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("server"), registry=scripts.REGISTRY) as server:
        perform(server.client(), "a-1", claim(PAID), settle(PAID)).expect(200)
        make_unknown(server.client(), LOST, action_id="a-2")
        make_unknown(server.client(), WRONG, action_id="a-3")
        yield server


def effects(server: Server, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the group with the server's token file."""
    chosen = {"AIP_CREWAI_BEARER_TOKEN_FILE": str(server.directory / "token"), "CREW_SUPERVISOR_SERVER": server.url}
    done: subprocess.CompletedProcess[str] = run("effects", *arguments, **{**chosen, **environ})
    assert "Traceback" not in done.stderr
    return done


def decide(server: Server, key_id: str, *more: str) -> subprocess.CompletedProcess[str]:
    return effects(server, "reconcile", key_id, "--actor", "ops", "--evidence", "statement 7", *more)


def test_a_list_names_each_effect_on_a_line(server: Server) -> None:
    done = effects(server, "list")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["key", "state", "tool", "crew", "action", "claimed", "reason"]
    assert [line.split()[:2] for line in lines[1:]] == [
        [WRONG.key_id, "unknown"], [LOST.key_id, "unknown"], [PAID.key_id, "settled"]
    ]  # fmt: skip


def test_a_list_is_filtered_and_goes_on_where_a_page_ended(server: Server) -> None:
    page = json.loads(effects(server, "list", "--limit", "2", "--json").stdout)
    rest = json.loads(effects(server, "list", "--json", "--cursor", page["next_cursor"]).stdout)
    assert [one["key_id"] for one in page["effects"] + rest["effects"]] == [WRONG.key_id, LOST.key_id, PAID.key_id]
    assert page["next_cursor"] in effects(server, "list", "--limit", "2").stderr
    done = effects(server, "list", "--state", "settled", "--crew", "scripted", "--json")
    assert [one["key_id"] for one in json.loads(done.stdout)["effects"]] == [PAID.key_id]
    assert json.loads(effects(server, "list", "--crew", "nobody", "--json").stdout)["effects"] == []


def test_an_effect_is_shown_whole_in_a_narrow_window_too(server: Server) -> None:
    shown = json.loads(effects(server, "show", PAID.key_id, "--json").stdout)
    assert shown == server.client().request("GET", f"/effects/{PAID.key_id}").json()
    done = effects(server, "show", PAID.key_id, COLUMNS="40")
    assert done.returncode == 0
    cells = [line.strip().partition(" ") for line in done.stdout.splitlines()]
    rows = {name: value.strip() for name, _, value in cells}
    assert (rows["key_id"], rows["state"], rows["preimage"]) == (PAID.key_id, "settled", PAID.preimage.decode())
    assert rows.keys() == {"field", *shown}


def test_a_decision_is_recorded(server: Server) -> None:
    done = decide(server, LOST.key_id, "--decision", "settled", "--receipt", '{"charge": "ch_1"}', "--json")
    assert done.returncode == 0, done.stderr
    view = json.loads(done.stdout)
    assert (view["state"], view["receipt"]) == ("settled", {"charge": "ch_1"})
    assert view["reconciliation"] == {"actor": "ops", "decision": "settled", "evidence": "statement 7"}


def test_exit_statuses_say_what_went_wrong(server: Server, tmp_path: Path) -> None:
    abandon = ("--decision", "abandoned")
    assert effects(server, "show", "0" * 64).returncode == 3
    assert decide(server, "0" * 64, *abandon).returncode == 3
    assert decide(server, PAID.key_id, *abandon).returncode == 4
    assert decide(server, WRONG.key_id, *abandon, "--version", "1").returncode == 4
    assert decide(server, WRONG.key_id).returncode == 2
    assert decide(server, WRONG.key_id, "--decision", "settled").returncode == 2
    assert decide(server, WRONG.key_id, "--decision", "settled", "--receipt", "{").returncode == 2
    assert effects(server, "list", "--state", "paid").returncode == 2
    assert effects(server, "list", "--server", "ftp://x").returncode == 2
    assert effects(server, "list", "--token-file", str(tmp_path / "missing")).returncode == 2
    other = tmp_path / "token"
    other.touch(mode=0o600)
    other.write_text("another-token")
    refused = effects(server, "list", "--token-file", str(other), "--json")
    assert (refused.returncode, json.loads(refused.stdout)["error"]["code"]) == (1, "unauthorized")
    assert server.client().request("GET", f"/effects/{WRONG.key_id}").json()["state"] == "unknown"


def test_a_server_that_is_not_there_is_unreachable(server: Server) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    done = effects(server, "list", "--server", f"http://127.0.0.1:{port}")
    assert (done.returncode, "unreachable" in done.stderr) == (6, True)
    assert json.loads(effects(server, "list", "--json", "--server", f"http://127.0.0.1:{port}").stdout)["ok"] is False


def test_the_token_may_be_in_the_environment_and_is_never_shown(server: Server) -> None:
    assert server.token is not None
    done = effects(server, "list", AIP_CREWAI_BEARER_TOKEN_FILE="", AIP_CREWAI_BEARER_TOKEN=server.token)
    assert done.returncode == 0
    assert effects(server, "list", AIP_CREWAI_BEARER_TOKEN_FILE="").returncode == 1
    assert server.token not in done.stdout + done.stderr
