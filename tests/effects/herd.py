"""Many processes at one ledger: ``python -m tests.effects.herd SIZE LEDGER URL`` and orders on standard input.

The processes are forked before any of them has opened the ledger. An order is a line of JSON, ``{"do": NAME, ...}``;
all processes begin it at the same moment, and each answers on standard output with one line, ``[number, outcome]``.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from demo.payments import provider
from protocol.errors import CrewError
from worker.effect import effect
from worker.guarding import session


def pay(url: str, invoice: str) -> str:
    """Pay once, whoever does it."""

    @effect(key="invoice", scope="global", tool="pay")
    def act(invoice: str) -> str:
        made = provider.charge(url, invoice, 1.0, key=effect.provider_key())
        return f"charge {made['id']}"

    result: str = act(invoice)
    return result


def perform(order: dict[str, Any], number: int, url: str) -> str:
    """What one process does. The session opens the ledger anew for ``open``, and keeps it for ``pay``."""
    try:
        if order["do"] == "pay":
            return pay(url, order["invoice"])
        with effect.ledger(order["ledger"], action=f"a{number}"), effect.claim("own", key=number, args={}) as call:
            call.settle(number)
        return "settled"
    except CrewError as error:
        return error.code
    except Exception as error:  # noqa: BLE001 - anything else is what the test must see
        return f"{type(error).__name__}: {error}"


def member(number: int, orders: int, answers: int, ledger: str, url: str) -> None:
    """One process: a line from its pipe is an order."""
    with os.fdopen(orders, encoding="utf-8") as lines:
        for line in lines:
            order = json.loads(line)
            if order["do"] == "pay" and session.known() is None:
                effect.use_ledger(ledger, action=f"a{number}")
            answer = json.dumps([number, perform(order, number, url)]) + "\n"
            os.write(answers, answer.encode())
    os._exit(0)


def main(size: int, ledger: str, url: str) -> None:
    """Fork, then pass every order on."""
    pipes = []
    for number in range(size):
        reading, writing = os.pipe()
        if os.fork() == 0:
            for pipe in (writing, *pipes):
                os.close(pipe)
            sys.stdin.close()
            member(number, reading, 1, ledger, url)
        os.close(reading)
        pipes.append(writing)
    for line in sys.stdin:
        for pipe in pipes:
            os.write(pipe, line.encode())
    for pipe in pipes:
        os.close(pipe)
    for _ in range(size):
        os.wait()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
