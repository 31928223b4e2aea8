"""What every run works with."""

from __future__ import annotations

import msgspec

from supervisor.config import Settings
from supervisor.journal import Journal
from supervisor.launcher import Launcher
from supervisor.metrics.meters import Meters
from supervisor.ownership import EffectLedger
from supervisor.processes import Reaper
from supervisor.strays import Hunter
from supervisor.workspace import Workspace


class Means(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of one supervisor that its runs share."""

    settings: Settings
    journal: Journal
    launcher: Launcher
    reaper: Reaper
    hunter: Hunter
    workspace: Workspace
    config_digest: str
    meters: Meters
    #: Where claims are decided: the journal's own ledger, or what the replicas of a fleet share.
    effects: EffectLedger
