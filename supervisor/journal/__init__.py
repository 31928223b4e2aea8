"""The durable journal: SQLite with one writer thread, group commit, one owner."""

from supervisor.journal.archive_file import ArchiveFile
from supervisor.journal.files import RESERVE_BYTES
from supervisor.journal.journal import Journal
from supervisor.journal.ledger import Ledger, Owner, Seen
from supervisor.journal.opening import open_journal
from supervisor.journal.outbox import Fact, Outbox
from supervisor.journal.records import (
    Admission,
    AuditEntry,
    Ended,
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
    "Ended",
    "Ending",
    "Fact",
    "Item",
    "JobPage",
    "JobRecord",
    "Journal",
    "Ledger",
    "NewJob",
    "Outbox",
    "Owner",
    "Quarantined",
    "RESERVE_BYTES",
    "RowQuarantined",
    "Seen",
    "StoredEvent",
    "Tombstone",
    "Unfinished",
    "WorkerIdentity",
    "open_journal",
]
