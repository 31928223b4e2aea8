"""``python demo/payments/main.py``: the same payment again and again, and one charge at the provider."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from demo.payments.provider import Provider  # noqa: E402
from demo.screen import Screen  # noqa: E402

QUIET = {
    "CREWAI_DISABLE_TELEMETRY": "true",
    "OTEL_SDK_DISABLED": "true",
    "CREWAI_TRACING_ENABLED": "false",
    "CREWAI_TESTING": "true",
    "CREWAI_DISABLE_VERSION_CHECK": "true",
}


def pay(ledger: Path, invoice: str, amount: float, *, action: str) -> str:
    """Let a crew in a process of its own pay; returns what it reports."""
    done = subprocess.run(
        [sys.executable, __file__, str(ledger), invoice, str(amount), action],
        env={**os.environ, **QUIET, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr.strip()[-300:]


def work(ledger: str, invoice: str, amount: str, action: str) -> None:
    """The child: a plain script as any crew author would write it."""
    from demo.payments.registry import payments
    from worker.effect import effect

    effect.use_ledger(ledger, action=action)
    print(payments().kickoff(inputs={"invoice": invoice, "amount": amount}).raw)


def main() -> int:
    """Run the scenes. Returns the exit status."""
    screen = Screen()
    with tempfile.TemporaryDirectory() as home:
        os.environ.update(HOME=home, CREWAI_STORAGE_DIR=home)
        ledger, provider = Path(home, "effects.db"), Provider(Path(home, "provider.db")).start()
        os.environ["PAYMENTS_URL"] = provider.url
        try:
            _scenes(screen, provider, ledger)
        finally:
            provider.kill()
    return 1 if screen.broken else 0


def _scenes(screen: Screen, provider: Provider, ledger: Path) -> None:
    screen.title("Pay invoice 17, twice, in two processes and under two Actions")
    answers = [pay(ledger, "17", 120.0, action=f"monday-{at}") for at in range(2)]
    for answer in answers:
        screen.fact("crew", answer)
    screen.claim(
        "the same answer twice, one charge at the provider",
        len(set(answers)) == 1 and len(provider.charges()) == 1,
    )

    screen.title("The provider acts and its acknowledgement is lost")
    provider.fault("lose_ack")
    answer = pay(ledger, "18", 80.0, action="tuesday")
    screen.fact("crew", answer)
    screen.claim(
        "CrewAI called again and paid nothing: the tool's reconcile function asked the provider, whose receipt this is",
        len(provider.charges()) == 2 and "charge 2" in answer,
    )

    screen.title("The provider refuses before it acts")
    provider.fault("fail")
    screen.fact("crew", pay(ledger, "19", 5.0, action="wednesday"))
    screen.claim(
        "the tool said that nothing happened, so the call was made again: one charge", len(provider.charges()) == 3
    )

    screen.title("Invoice 17 again, with another amount")
    screen.fact("crew", pay(ledger, "17", 999.0, action="thursday"))
    screen.claim("refused: the invoice was paid with another amount", len(provider.charges()) == 3)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        work(*sys.argv[1:])
    else:
        sys.exit(main())
