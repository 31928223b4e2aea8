"""Replicas on machines of their own: each in a network namespace, or behind a relay where none can be made."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

from tests.support.client import Client
from tests.support.declared import Declared, DeclaredClient
from tests.support.planned import PlannedServer
from tests.support.postgres import Postgres, free_port
from tests.support.server import ROOT, START_DEADLINE_S, Server
from tests.support.tcp_relay import TcpRelay

LEASE_S = 4.0
#: Set to have all replicas on this machine, behind relays, as where namespaces are not allowed.
NO_NAMESPACES = "CREW_TESTS_NO_NAMESPACES"
REGISTRY = "tests.crews.counted_crews:CREWS"
_numbers = itertools.count(1)


class Machine(NamedTuple):
    """Where a replica runs: a command that starts it there, its address, and the database's as seen from there."""

    prefix: tuple[str, ...]
    host: str
    port: int
    dsn: str


class Network(Protocol):
    """Machines, each with a link to the database of its own."""

    def machine(self, number: int) -> Machine:
        """The machine of that number, from 0 on."""
        ...

    def cut(self, number: int) -> None:
        """Take its link to the database down; that to the others and to us stays."""
        ...

    def heal(self, number: int) -> None:
        """Bring it up again."""
        ...


class Namespaces:
    """Two bridges, one for the database and one for HTTP, and a network namespace with a leg on each per machine."""

    def __init__(self, postgres: Postgres, database: str, count: int) -> None:
        self._postgres, self._database = postgres, database
        tag = f"{os.getpid() % 100_000}{next(_numbers)}"
        self._net = _free_net()
        self._bridges = (f"cfd{tag}", f"cfh{tag}")
        self._names = [f"crew-fleet-{tag}-{number}" for number in range(count)]
        self._legs = [(f"cd{tag}{number}", f"ch{tag}{number}") for number in range(count)]

    def _address(self, side: int, host: int) -> str:
        return f"198.{18 + side}.{self._net}.{host}"  # RFC 2544: never anybody's

    def build(self) -> None:
        """Make it all. Raises CalledProcessError where that is not allowed."""
        for side, bridge in enumerate(self._bridges):
            _ip("link", "add", bridge, "type", "bridge")
            _ip("address", "add", f"{self._address(side, 254)}/24", "dev", bridge)
            _ip("link", "set", bridge, "up")
        for number, name in enumerate(self._names):
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
            for side, (bridge, leg) in enumerate(zip(self._bridges, self._legs[number], strict=True)):
                _ip("link", "add", leg, "type", "veth", "peer", "name", f"eth{side}", "netns", name)
                _ip("link", "set", leg, "master", bridge, "up")
                _ip("-n", name, "address", "add", f"{self._address(side, number + 1)}/24", "dev", f"eth{side}")
                _ip("-n", name, "link", "set", f"eth{side}", "up")

    def remove(self) -> None:
        """Take it all down."""
        for name in self._names:
            _ip("netns", "delete", name, check=False)
        for bridge in self._bridges:
            _ip("link", "delete", bridge, check=False)

    def machine(self, number: int) -> Machine:
        # Not `ip netns exec`: that would put another /sys over the one with the cgroups.
        prefix = ("nsenter", f"--net=/run/netns/{self._names[number]}")
        dsn = self._postgres.dsn(self._database, host=self._address(0, 254))
        return Machine(prefix, self._address(1, number + 1), 8090, dsn)

    def cut(self, number: int) -> None:
        _ip("link", "set", self._legs[number][0], "down")

    def heal(self, number: int) -> None:
        _ip("link", "set", self._legs[number][0], "up")


class Relayed:
    """All on this machine, each with a relay between itself and the database."""

    def __init__(self, postgres: Postgres, database: str, relays: list[TcpRelay]) -> None:
        self._postgres, self._database = postgres, database
        self.relays = relays
        self._ports = [free_port() for _ in relays]

    def machine(self, number: int) -> Machine:
        dsn = self._postgres.dsn(self._database, port=self.relays[number].port)
        return Machine((), "127.0.0.1", self._ports[number], dsn)

    def cut(self, number: int) -> None:
        self.relays[number].cut()

    def heal(self, number: int) -> None:
        self.relays[number].heal()


def _free_net() -> int:
    """A number that no bridge of such a network has, here or in another run."""
    taken = subprocess.run(["ip", "-4", "address"], capture_output=True, text=True, timeout=30, check=True).stdout
    wanted = (os.getpid() + number for number in range(250))
    return next(number % 250 for number in wanted if f" 198.18.{number % 250}.254/" not in taken)


def namespaces_allowed() -> bool:
    """Whether this process may make network namespaces, and nobody has said that it should do without."""
    if NO_NAMESPACES in os.environ or os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("nsenter")):
        return False
    name = f"crew-probe-{os.getpid()}"
    with contextlib.suppress(subprocess.CalledProcessError):
        _ip("netns", "add", name)
        _ip("netns", "delete", name)
        return True
    return False


@contextlib.contextmanager
def network(postgres: Postgres, database: str, count: int) -> Iterator[Network]:
    """As many machines, in namespaces where that is allowed."""
    if not namespaces_allowed():
        with relayed(postgres, database, count) as made:
            yield made
        return
    namespaces = Namespaces(postgres, database, count)
    try:
        namespaces.build()
        yield namespaces
    finally:
        namespaces.remove()


@contextlib.contextmanager
def relayed(postgres: Postgres, database: str, count: int) -> Iterator[Relayed]:
    """As many machines behind relays that can lose what they pass on."""
    with contextlib.ExitStack() as stack:
        relays = [stack.enter_context(TcpRelay("127.0.0.1", postgres.port, seed=number)) for number in range(count)]
        yield Relayed(postgres, database, relays)


def _ip(*arguments: str, check: bool = True) -> None:
    subprocess.run(["ip", *arguments], check=check, capture_output=True, timeout=30)


class Replica(Server):
    """One supervisor of a fleet; whatever it answers must be declared in its own document."""

    _declared: Declared | None = None

    def client(self, *, timeout_s: float = 60.0) -> Client:
        """A client that checks every answer against the replica's OpenAPI document."""
        plain = super().client(timeout_s=timeout_s)
        if self._declared is None:
            self._declared = Declared.of(plain)
        return DeclaredClient(plain, self._declared)


class Replicas:
    """Supervisors of one fleet; each execution of theirs appends its Action to one file."""

    def __init__(self, directory: Path, network: Network, *, lease_s: float = LEASE_S) -> None:
        self.directory = directory
        self.network = network
        self.lease_s = lease_s
        self.executions = directory / "executions"
        self.servers: list[Server] = []

    def add(
        self,
        *,
        replica: str | None = None,
        settings: dict[str, Any] | None = None,
        environment: dict[str, str | None] | None = None,
        mutant: str | None = None,
        registry: str = REGISTRY,
    ) -> Server:
        """One more, not started. Its number is that of its machine."""
        number = len(self.servers)
        machine = self.network.machine(number)
        chosen = {
            "host": machine.host,
            "port": machine.port,
            "max_concurrency": 8,
            "grace_s": 0.0,
            "drain_s": 0.2,
            "fleet": {
                "replica": replica or f"replica-{number}",
                "url": f"http://{machine.host}:{machine.port}",
                "lease_s": self.lease_s,
            },
            **(settings or {}),
        }
        server = Replica(
            self.directory / f"replica-{number}",
            registry=registry,
            settings=chosen,
            environment={
                "EXECUTIONS_FILE": str(self.executions),
                "CREW_SUPERVISOR_FLEET_DATABASE": machine.dsn if chosen["fleet"] else None,
                **(environment or {}),
            },
            prefix=machine.prefix,
            mutant=mutant,
        )
        self.servers.append(server)
        return server

    def start(self, count: int) -> list[Server]:
        """So many, started and registered."""
        for _ in range(count):
            self.add().launch()
        for server in self.servers:
            listens(server)
            registered(server)
        return self.servers

    def command(self, server: Server, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command of the program against one replica."""
        places = {
            "CREW_SUPERVISOR_SERVER": server.url,
            "AIP_CREWAI_BEARER_TOKEN_FILE": str(server.directory / "token"),
            "PYTHONPATH": str(ROOT),
            "PATH": os.environ["PATH"],
        }
        return subprocess.run(
            [sys.executable, "-m", "supervisor", *arguments],
            env=places, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip

    def close(self) -> None:
        """End all of them."""
        for server in self.servers:
            server.close()

    def executed(self) -> list[str]:
        """Every execution so far."""
        return self.executions.read_text(encoding="ascii").split() if self.executions.exists() else []


def listens(server: Server) -> Server:
    """Wait until a launched server can be asked."""
    line = server.wait_log("listening", deadline_s=60)
    server.host, server.port = line["host"], line["port"]
    return server


def registered(server: Server, *, skip: int = 0, deadline_s: float = 30.0) -> dict[str, Any]:
    """Wait for a registration; ``skip``: log lines to leave out."""
    return server.wait_log("replica_registered", deadline_s=deadline_s, skip=skip)


def wait_status(server: Server, action_id: str, status: str, *, deadline_s: float = 30.0) -> Any:
    """Ask one replica for a record until it has that status."""

    def has_it() -> Any:
        answer = server.client().get(action_id)
        return answer.json() if answer.status == 200 and answer.json()["status"] == status else None

    return wait_for(has_it, f"{action_id} is {status}", deadline_s=deadline_s)


def wait_for(look: Any, what: str, *, deadline_s: float = 30.0) -> Any:
    """What ``look`` returns once that is not false."""
    give_up = time.monotonic() + deadline_s
    while True:
        found = look()
        if found:
            return found
        assert time.monotonic() < give_up, f"not within {deadline_s:g} s: {what}"
        time.sleep(0.05)


class Registering(Server):
    """A replica alone in its fleet, whose machine is here: every start is registered before it counts as started.

    A lease that its predecessor left ends at the start, as if its time had passed.
    """

    def join(self, postgres: Postgres, database: str) -> None:
        """Be a replica of the fleet in ``database``."""
        self._postgres, self._database = postgres, database
        self.settings["fleet"] = {"replica": "alone", "url": "http://127.0.0.1:1", "lease_s": 60}
        self.environment["CREW_SUPERVISOR_FLEET_DATABASE"] = postgres.dsn(database)

    def start(self, *, deadline_s: float = START_DEADLINE_S) -> Self:
        """Start and register."""
        if self._logs:
            self._postgres.ask(self._database, "UPDATE crew_supervisor.replicas SET expires_at = clock_timestamp()")
        super().start(deadline_s=deadline_s)
        self.wait_log("shared_effects_open", deadline_s=deadline_s)
        return self


class PlannedReplica(Registering, PlannedServer):
    """One that follows a plan."""
