"""The durable journal: SQLite with one writer thread, group commit, one owner."""

from supervisor.journal.archive_file import ArchiveFile
from supervisor.journal.files import RESERVE_BYTES
from supervisor.journal.journal import Journal
from supervisor.journal.opening import open_journal
from supervisor.journal.records import (
    Admission,
    AuditEntry,
    Ending,
    Item,
    JobPage,
    JobRecord,
    NewJob,
    Quarantined,
    RowQuarantined,
    StoredEvent,
    Tombstone,
    Unfinished,
    WorkerIdentity,
)

__all__ = [
    "Admission",
    "ArchiveFile",
    "AuditEntry",
    "Ending",
    "Item",
    "JobPage",
    "JobRecord",
    "Journal",
    "NewJob",
    "Quarantined",
    "RESERVE_BYTES",
    "RowQuarantined",
    "StoredEvent",
    "Tombstone",
    "Unfinished",
    "WorkerIdentity",
    "open_journal",
]
