"""``make demo``: four scenes with a real supervisor, real CrewAI crews and a scripted model. No key, no network.

Exit status 0 only if everything that was printed as true was true.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path
from types import FrameType

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from demo import scenes
from demo.screen import Screen
from demo.server import Server, StartFailed

SCENES = (scenes.run_and_stream, scenes.cancel_a_training, scenes.kill_the_supervisor, scenes.send_it_twice)
INTERRUPTED = 130


def main() -> int:
    """Show the scenes; returns the exit status."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    screen = Screen()
    began = time.monotonic()
    server = Server()
    try:
        _play(screen, server)
    except KeyboardInterrupt:
        screen.write("\n\n   interrupted; ending what was started\n")
        return INTERRUPTED
    except StartFailed as error:
        screen.claim("the supervisor started", False)
        screen.say(str(error))
    except Exception as error:  # noqa: BLE001 - whatever broke, it is said, and what runs is ended
        screen.claim(f"the scene went to its end: {type(error).__name__}: {error}", False)
    finally:
        # A second Ctrl-C must not keep us from cleaning up.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        cleared = server.clear()
    screen.title("At the end")
    screen.claim("no process, no cgroup and no file of this demo is left", cleared)
    if screen.broken:
        for line in server.errors[-5:]:
            screen.note(f"supervisor's log: {json.dumps(line)}")
    _conclude(screen, time.monotonic() - began)
    return 1 if screen.broken else 0


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _play(screen: Screen, server: Server) -> None:
    screen.write(screen.paint("crew-supervisor: CrewAI jobs that can be stopped for certain\n", "bold"))
    screen.say("Starting a supervisor. Real CrewAI crews, a scripted model: no key, no network.")
    server.start()
    health = server.client.get("/health").document
    screen.fact("supervisor", f"pid {server.pid} at {server.url}, ready in {server.ready_s:.1f} s")
    screen.fact("crews", f"{', '.join(health['crews'])} (CrewAI {health['crewai_version']})")
    screen.fact("workers by", f"{health['launch_mode']} from a template that has imported CrewAI once")
    screen.fact("stops proved by", health["stop_method"])
    for scene in SCENES:
        scene(screen, server)
    status = server.stop()
    screen.title("Ending the supervisor with SIGTERM")
    screen.claim(f"it ended by itself with status {status}", status == 0)


def _conclude(screen: Screen, took_s: float) -> None:
    held = screen.claims - screen.broken
    verdict = f"{held} of {screen.claims} claims held, {took_s:.0f} s"
    screen.write("\n" + screen.paint(verdict, "red" if screen.broken else "green") + "\n")


if __name__ == "__main__":
    sys.exit(main())
