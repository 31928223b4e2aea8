"""Limits on the supervisor that its concurrency may run into, the port, the users, the secrets."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket

import psutil

from protocol.errors import ConfigError, StartError
from supervisor.cgroup import own_directory
from supervisor.config import Settings, resolve_worker_user
from supervisor.doctor.finding import Said, failure, ok, warning
from supervisor.environment import descriptors_needed
from supervisor.journal.files import owner_of

#: Processes and threads that a job may well have, and that everything else has.
TASKS_PER_JOB = 32
TASKS_ELSE = 64
#: Below this, characters, a token can be guessed.
SHORT_TOKEN = 16


def descriptors(settings: Settings) -> Said:
    """Open files that we may have, against what so many jobs take."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = descriptors_needed(settings.max_concurrency)
    if hard != resource.RLIM_INFINITY and hard < needed:
        detail = f"{hard} descriptors are too few for max_concurrency = {settings.max_concurrency}"
        return warning(detail, f"allow {needed} (LimitNOFILE=, ulimit -n), or lower max_concurrency")
    return ok(f"up to {'any number of' if hard == resource.RLIM_INFINITY else hard} descriptors, {needed} needed")


def processes(settings: Settings) -> Said:
    """Processes that we and our workers may have."""
    limits = dict(_pids_limits(settings))
    if os.geteuid() != 0 or settings.worker_user is not None:
        soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
        if soft != resource.RLIM_INFINITY:
            limits["RLIMIT_NPROC"] = soft
    return judge_processes(limits, settings.max_concurrency)


def judge_processes(limits: dict[str, int], max_concurrency: int) -> Said:
    """Whether the least of the limits, by where it is, is enough; threads count too."""
    if not limits:
        return ok("no limit on processes")
    where, least = min(limits.items(), key=lambda item: item[1])
    needed = max_concurrency * TASKS_PER_JOB + TASKS_ELSE
    if least < needed:
        detail = f"{where} allows {least} processes and threads, which {max_concurrency} jobs may exceed"
        return warning(detail, f"allow {needed} (TasksMax=, --pids-limit), or lower max_concurrency")
    return ok(f"{where} allows {least} processes and threads")


def _pids_limits(settings: Settings) -> list[tuple[str, int]]:
    try:
        own = own_directory(settings.cgroup_root).path
    except StartError:
        return []
    found = []
    for directory in (own, *own.parents):
        with contextlib.suppress(OSError, ValueError):
            found.append((f"{directory}/pids.max", int((directory / "pids.max").read_text(encoding="ascii"))))
    return found


def worker_user(settings: Settings) -> Said:
    """Whom workers run as."""
    try:
        user = resolve_worker_user(settings)
    except ConfigError as error:
        detail, _, advice = error.detail.rpartition("; ")
        return failure(detail or error.detail, advice)
    if user is not None:
        return ok(f"{settings.worker_user} (uid {user.uid})")
    if os.geteuid() == 0:
        return warning("crews run as root", "set worker_user to a user without privileges")
    return ok(f"crews run as the supervisor, uid {os.geteuid()}")


def tokens(settings: Settings) -> Said:
    """Whether callers must show a token, and whether others can read our secrets. Modes were checked by the reading."""
    if not settings.tokens:
        return warning(f"anyone on {settings.host} may start and cancel work", "set bearer_token_file")
    if any(len(token) < SHORT_TOKEN for token in (*settings.tokens, *settings.read_tokens)):
        return warning(f"a token has fewer than {SHORT_TOKEN} characters", "make one with `openssl rand -hex 32`")
    path = settings.config_file
    exposed = [crew_id for crew_id, crew in settings.crews.items() if crew.environment]
    if path is not None and exposed and path.stat().st_mode & 0o077:
        return warning(f"{path} has crews' environments in it and others may read it", f"chmod 0600 {path}")
    counted = f"{len(settings.tokens)} that may do everything, {len(settings.read_tokens)} that only read"
    return ok(f"{counted}; no file is open to others")


def port(settings: Settings) -> Said:
    """Whether we could listen there, or already do."""
    host, number = settings.host, settings.port
    if number == 0:
        return ok("any free port")
    try:
        addresses = socket.getaddrinfo(host, number, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in addresses:
            _bind(family, kind, protocol, address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return _taken(settings)
        why = error.strerror or str(error)
        return failure(f"cannot listen on {host}:{number}: {why}", "set host and port to what this machine has")
    return ok(f"{host}:{number} is free")


def _bind(family: int, kind: int, protocol: int, address: object) -> None:
    """Bind as the server would, and listen not."""
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        probe.bind(address)  # type: ignore[arg-type]


def _taken(settings: Settings) -> Said:
    where = f"{settings.host}:{settings.port}"
    pids = _listeners(settings.port)
    owner = None
    if settings.state_file is not None:
        with contextlib.suppress(OSError):
            owner = owner_of(settings.state_file)
    if owner is not None and owner.pid in pids:
        return ok(f"the running supervisor, pid {owner.pid}, listens on {where}")
    who = ", ".join(f"pid {pid} ({_name(pid)})" for pid in pids) or "a process of another user"
    return failure(f"{who} listens on {where}", "end it, or set another port")


def _listeners(number: int) -> list[int]:
    with contextlib.suppress(psutil.Error, OSError):
        found = psutil.net_connections("tcp")
        return sorted(
            {
                connection.pid
                for connection in found
                if connection.status == psutil.CONN_LISTEN
                and connection.pid is not None
                and connection.laddr
                and connection.laddr.port == number
            }
        )
    return []


def _name(pid: int) -> str:
    with contextlib.suppress(psutil.Error):
        return str(psutil.Process(pid).name())
    return "gone"
