"""The numbers to reach: one table. Whether they were reached is computed in ``bench.targets``."""

from __future__ import annotations

from bench.targets import Target, above, fewer, more, read, sum_of

_NOTHING = "0 retained, 16 clients"
_MOST = "1,000,000 retained, 16 clients"
_LARGE = "2,000 retained of 43 kB"
_COLD = read("start", "cold, 1 at once, admitted to factory, fake")
_KILLED = "kill the pid, 50 descendants, until waited for"
_SURVIVORS = "{}: survivors"
_METHODS = ("cgroup", "cgroup and pid_namespace", "keeper")
_FRESH = read("footprint", "0 retained, resident")

TARGETS: tuple[Target, ...] = (
    Target("admission to factory, p50", 25, "ms", read("start", "forked, 1 at once, admitted to factory, real"), _COLD),
    Target(
        "admission to factory, p99",
        100,
        "ms",
        read("start", "forked, 1 at once, admitted to factory, real", "p99"),
        read("start", "cold, 1 at once, admitted to factory, fake", "p99"),
    ),
    Target(
        "admission to factory, 16 at once, p99",
        150,
        "ms",
        read("start", "forked, 16 at once, admitted to factory, real", "p99"),
        read("start", "cold, 16 at once, admitted to factory, fake", "p99"),
    ),
    Target(
        "cancel to proof, blocked in a thread, p50",
        15,
        "ms",
        read("stop", "cgroup: thread, evidence"),
        read("stop", _KILLED),
    ),
    Target(
        "cancel to proof, blocked in a thread, p99",
        50,
        "ms",
        read("stop", "cgroup: thread, evidence", "p99"),
        read("stop", _KILLED, "p99"),
    ),
    Target(
        "survivors of all stops",
        0,
        "",
        sum_of("stop", *(_SURVIVORS.format(method) for method in _METHODS)),
        read("stop", "kill the pid, survivors", "sum"),
    ),
    Target(
        "admissions, 16 clients, instant crews, 2,000 of 43 kB retained",
        1000,
        "1/s",
        read("admission", f"{_LARGE}, instant crews, 16 clients, admissions"),
        read("admission", f"{_LARGE}, whole file rewritten, admissions"),
        at_most=False,
    ),
    Target(
        "admissions, fewer with 1,000,000 retained than with none",
        25,
        "%",
        fewer(read("admission", f"{_MOST}, admissions"), read("admission", f"{_NOTHING}, admissions")),
        fewer(
            read("admission", "1,000,000 retained, whole file rewritten, admissions"),
            read("admission", "0 retained, whole file rewritten, admissions"),
        ),
    ),
    Target(
        "processor time of an admission, more with 1,000,000 retained",
        10,
        "%",
        above(
            read("admission", f"{_MOST}, processor time each"), read("admission", f"{_NOTHING}, processor time each")
        ),
    ),
    Target("jobs end to end", 100, "1/s", read("jobs", "jobs"), read("jobs", "fresh interpreter, jobs"), at_most=False),
    *(
        Target(
            f"durable events, {workers} workers",
            bound,
            "1/s",
            read("events", f"{workers} workers, durable"),
            read("events", "bare SQLite, one in a transaction, durable"),
            at_most=False,
        )
        for workers, bound in ((1, 20_000), (8, 50_000))
    ),
    *(
        Target(
            f"event visible at half of that rate, {workers} workers, p99",
            10,
            "ms",
            read("events", f"{workers} workers at half rate, visible", "p99"),
            read("events", "bare fsync of 8 kB", "p99"),
        )
        for workers in (1, 8)
    ),
    Target("supervisor, idle", 70, "MB", _FRESH, read("footprint", "100,000 retained, one JSON file, resident")),
    Target(
        "supervisor, more with 100,000 retained",
        5,
        "MB",
        more(read("footprint", "100,000 retained, resident"), _FRESH),
        more(
            read("footprint", "100,000 retained, one JSON file, resident"),
            read("footprint", "0 retained, one JSON file, resident"),
        ),
    ),
    Target(
        "supervisor, growth from 1,000 to 10,000 jobs",
        5,
        "MB",
        read("jobs", "growth from 1,000 to 10,000 jobs", "last"),
    ),
    Target(
        "worker after one kickoff, unique",
        30,
        "MB",
        read("memory", "forked worker, unique"),
        read("memory", "cold worker, unique"),
    ),
    *(
        Target(
            f"health while {what}, p99",
            50,
            "ms",
            read("health", f"{what}, answer", "p99"),
            read("health", "in its own process, a factory blocks, answer", "p99"),
        )
        for what in ("a factory blocks", "a worker floods", "a client stalls")
    ),
    Target(
        "effects, 50 clients",
        2000,
        "1/s",
        read("effects", "50 workers x 1 threads, effects"),
        read("effects", "bare SQLite, effects"),
        at_most=False,
    ),
)
