"""A crew's resource limits: by cgroup controllers where they are delegated to us, by rlimits elsewhere.

Sources: memory.max, memory.oom.group, pids.max and cpu.weight in Linux' cgroup-v2.rst; setrlimit(2).
"""

from __future__ import annotations

import msgspec

from protocol.frames import Limits

#: Controllers that a limit of ours can use.
CONTROLLERS = ("memory", "pids", "cpu")


class Plan(msgspec.Struct, frozen=True):
    """``files``: what to write into a job's leaf, in order. ``rlimits``: what the worker sets for itself."""

    files: tuple[tuple[str, str], ...]
    rlimits: Limits


def plan(limits: Limits, controllers: frozenset[str]) -> Plan:
    """Divide a crew's limits between the controllers at hand and rlimits.

    A memory limit by rlimit counts address space, and a process limit counts all of the user's: where a controller
    does better, the rlimit is left out.
    """
    files: list[tuple[str, str]] = []
    left = limits
    if limits.memory_bytes is not None and "memory" in controllers:
        # The whole job dies of it: half a crew is of no use, and its death is named as such.
        files += [("memory.max", str(limits.memory_bytes)), ("memory.oom.group", "1")]
        left = msgspec.structs.replace(left, memory_bytes=None)
    if limits.processes is not None and "pids" in controllers:
        files.append(("pids.max", str(limits.processes)))
        left = msgspec.structs.replace(left, processes=None)
    if limits.cpu_weight is not None and "cpu" in controllers:
        files.append(("cpu.weight", str(limits.cpu_weight)))
    return Plan(files=tuple(files), rlimits=left)
