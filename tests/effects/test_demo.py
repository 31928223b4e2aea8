"""The example does what it claims."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(240)
def test_every_claim_of_the_payment_example_holds() -> None:
    done = subprocess.run(
        [sys.executable, "demo/payments/main.py"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("  ok  ") == 4
