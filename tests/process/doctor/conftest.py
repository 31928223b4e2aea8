"""What the doctor looks at."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.registries import GOOD, with_registry
from tests.support.server import Server, ServerFactory


@pytest.fixture
def server(make_server: ServerFactory, tmp_path: Path) -> Server:
    """A server that would start, and was not started."""
    return with_registry(make_server, tmp_path, GOOD)
