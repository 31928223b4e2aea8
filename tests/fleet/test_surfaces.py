"""What a replica says of itself and the fleet: readiness as a host knows it, the roster, metrics, rights."""

from __future__ import annotations

import http.client
import json
import re
from typing import Any

import jsonschema
import msgspec
import yaml
from prometheus_client.parser import text_string_to_metric_families

from protocol.fleet import FleetView, HostReady, ReplicaView
from supervisor.config.table import FLEET_SETTINGS, SETTINGS
from supervisor.fleet import VERSION
from supervisor.metrics.table import FLEET_METRICS, METRICS
from tests.fleet.checks import fleet, scraped, start
from tests.fleet.conftest import Lasting
from tests.support.fleet import Replicas, listens, registered, wait_for
from tests.support.postgres import PASSWORD, Postgres
from tests.support.server import ROOT, Server, ServerFactory

DOCUMENT = (ROOT / "docs" / "fleet.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```\w*\n(.*?)^```", DOCUMENT, re.MULTILINE | re.DOTALL)
#: Wire contract, section 17.
HOST_METRICS = {
    "ready", "storage_ready", "in_flight", "requests_total", "rejected_total", "heartbeat_failures_total",
    "lease_recovery_attempts_total", "lease_recoveries_total",
}  # fmt: skip


def open_ready(server: Server) -> tuple[int, Any]:
    """``/ready`` as a load balancer asks for it: without a token."""
    connection = http.client.HTTPConnection(server.host, server.port, timeout=30)
    connection.request("GET", "/ready")
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


def families(server: Server) -> dict[str, str]:
    """Name and type of every metric of ours."""
    text = server.client().request("GET", "/metrics").body.decode()
    found = text_string_to_metric_families(text)
    return {family.name: family.type for family in found if family.name.startswith("crew_supervisor")}


def test_readiness_is_the_references_document(lasting: Lasting) -> None:
    status, document = open_ready(lasting.servers[0])
    jsonschema.validate(document, msgspec.json.schema(HostReady))
    assert status == 200
    assert list(document) == ["status", "lease_valid", "draining", "runtime", "connector"]
    assert list(document["runtime"]) == ["durability", "ready", "detail", "recovery"]
    assert list(document["runtime"]["recovery"]) == [
        "recovered_at", "pending_approvals", "recoverable_transactions", "queued_results", "delegation_results",
        "callback_deliveries",
    ]  # fmt: skip
    assert list(document["connector"]) == ["ready", "detail"]
    assert (document["status"], document["lease_valid"], document["draining"]) == ("ready", True, False)


def test_details_are_for_those_who_have_a_token(replicas: Replicas) -> None:
    server = replicas.add()
    replicas.network.cut(0)
    server.launch()
    listens(server)
    wait_for(lambda: "database" in _detail(server), "it has tried")
    status, document = open_ready(server)
    assert (status, document["status"], document["runtime"]["detail"]) == (503, "not_ready", "")
    assert document["runtime"]["ready"] is True, "the journal is well"
    checks = server.client().request("GET", "/readyz").expect(503)["readiness"]
    assert [name for name, check in checks.items() if not check["ok"]] == ["lease"]


def _detail(server: Server) -> str:
    detail: str = server.client().request("GET", "/ready").json()["runtime"]["detail"]
    return detail


def test_the_metrics_of_a_host_are_there_under_our_prefix(lasting: Lasting, start_server: ServerFactory) -> None:
    ours = {row.name.removesuffix("_total"): row.kind.value for row in FLEET_METRICS}
    assert {f"crew_supervisor_host_{name}" for name in HOST_METRICS} <= {row.name for row in FLEET_METRICS}
    found = families(lasting.servers[0])
    assert ours.items() <= found.items()
    assert found.keys() == ours.keys() | {row.name.removesuffix("_total") for row in METRICS}
    alone = families(start_server(registry="tests.crews.fake_crews:CREWS"))
    assert not ours.keys() & alone.keys()


def test_requests_are_counted_where_they_came(lasting: Lasting) -> None:
    owner, other, _ = lasting.servers

    def counts(server: Server) -> tuple[float, float, float]:
        names = ("host_requests_total", "host_rejected_total", "fleet_relayed_total")
        requests, rejected, relayed = (scraped(server, f"crew_supervisor_{name}") for name in names)
        return requests, rejected, relayed

    before = counts(other)
    start(owner, "counted").expect(200)
    start(other, "counted").expect(200)
    start(other, "counted", other="material").expect(409)
    assert [after - was for after, was in zip(counts(other), before, strict=True)] == [2, 1, 1]
    assert scraped(other, "crew_supervisor_host_ready") == 1


def test_every_replica_lists_all_of_them(lasting: Lasting) -> None:
    for number, server in enumerate(lasting.servers):
        document = fleet(server)
        jsonschema.validate(document, msgspec.json.schema(FleetView))
        assert document.keys() == set(FleetView.__struct_fields__)
        assert (document["replica_id"], document["lease_valid"]) == (f"replica-{number}", True)
        listed = document["replicas"]
        assert [one["replica_id"] for one in listed] == ["replica-0", "replica-1", "replica-2"]
        assert all(one.keys() == set(ReplicaView.__struct_fields__) for one in listed)
        assert [one["url"] for one in listed] == [server.url for server in lasting.servers]


def test_a_role_without_rights_is_told_what_to_run_and_the_documented_grants_suffice(
    replicas: Replicas, postgres: Postgres, database: str
) -> None:
    role = f"plain_{database}"
    postgres.ask("postgres", f"CREATE ROLE {role} LOGIN PASSWORD '{PASSWORD}'")
    rule = postgres.directory / "data" / "pg_hba.conf"
    rule.write_text(f"host all {role} 0.0.0.0/0 scram-sha-256\n{rule.read_text()}")
    postgres.ask("postgres", "SELECT pg_reload_conf()")
    server = replicas.add()
    dsn = str(server.environment["CREW_SUPERVISOR_FLEET_DATABASE"])
    server.environment["CREW_SUPERVISOR_FLEET_DATABASE"] = dsn.replace("//crew:", f"//{role}:")
    server.launch()
    listens(server)
    wait_for(lambda: "crew-supervisor fleet init" in _detail(server), "it says what to run")

    made = server.run_command("fleet", "init")
    assert (made.returncode, "role may not make it" in made.stderr) == (1, True)
    server.environment["CREW_SUPERVISOR_FLEET_DATABASE"] = dsn
    made = server.run_command("fleet", "init")
    assert (made.returncode, made.stdout) == (0, f"version {VERSION}, was 0\n"), made.stderr
    (grants,) = (block for block in BLOCKS if block.startswith("GRANT"))
    postgres.ask(database, grants.replace("TO crew;", f"TO {role};"))
    registered(server)
    start(server, "granted").expect(200)
    wait_for(lambda: fleet(server)["outbox"] == 0, "its ending is told")
    body = {"actor": "me", "evidence": "none"}
    refused = server.client().request("POST", "/fleet/replica-0/retire", body=body)
    assert refused.expect(409)["code"] == "replica_live"


def test_the_document_names_settings_and_metrics_that_there_are() -> None:
    variables = {row.variable for row in (*SETTINGS, *FLEET_SETTINGS)}
    named = set(re.findall(r"\b(?:CREW_SUPERVISOR|AIP_CREWAI)_[A-Z_]+", DOCUMENT))
    assert named
    assert named <= variables
    metrics = set(re.findall(r"`(?:crew_supervisor_host)?(_[a-z_]+)`", DOCUMENT))
    assert {name.removeprefix("_") for name in metrics} == HOST_METRICS
    (manifest,) = (block for block in BLOCKS if block.startswith("apiVersion"))
    service, stateful = yaml.safe_load_all(manifest)
    assert stateful["spec"]["serviceName"] == service["metadata"]["name"]


def test_a_token_that_may_read_retires_nobody(replicas: Replicas) -> None:
    token = replicas.directory / "read-token"
    token.touch(mode=0o600)
    token.write_text("a-token-that-may-read", encoding="utf-8")
    server = replicas.add(settings={"read_token_files": [str(token)]}).launch()
    registered(listens(server))
    server.token = "a-token-that-may-read"
    assert server.client().request("GET", "/fleet").status == 200
    body = {"actor": "me", "evidence": "none"}
    refused = server.client().request("POST", "/fleet/replica-0/retire", body=body)
    assert refused.expect(403)["code"] == "read_only_token"
    for broken in ({}, {"actor": "me"}, {"actor": "me", "evidence": ""}, {**body, "more": 1}):
        server.token = server.directory.joinpath("token").read_text(encoding="utf-8")
        assert server.client().request("POST", "/fleet/replica-0/retire", body=broken).status == 422


def test_a_supervisor_alone_has_none_of_these_routes(start_server: ServerFactory) -> None:
    server = start_server(registry="tests.crews.fake_crews:CREWS")
    for path in ("/ready", "/fleet"):
        assert server.client().request("GET", path).expect(404)["code"] == "route_unknown"
    server.token = None
    assert server.client().request("GET", "/ready").status == 401
    assert "/fleet" not in Server.client(server).request("GET", "/openapi.json").body.decode()


def test_nothing_says_the_password_of_the_database(lasting: Lasting) -> None:
    for server in lasting.servers:
        assert PASSWORD not in server.log_file.read_text(encoding="utf-8")
        assert PASSWORD not in json.dumps(server.client().health().json())
