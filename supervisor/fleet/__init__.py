"""Several supervisors that share PostgreSQL. Nothing outside of ``serve`` and the command line imports this.

What is shared is decided in the database, in one statement or transaction, under the fence of the replica's epoch;
nothing of ours elects, replicates or gossips.
"""

from supervisor.fleet.fleet import Fleet
from supervisor.fleet.schema import VERSION, make_schema

__all__ = ["Fleet", "VERSION", "make_schema"]
