"""Entry point of ``crew-supervisor`` and ``python -m supervisor``.

``serve`` goes straight to the server: the long-lived process never pays for the command line's imports.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def serve(config_path: Path | None) -> int:
    """Run the server; returns its exit status."""
    from supervisor import serve as server

    return server.main(config_path)


def main() -> None:
    """Dispatch on the first argument."""
    if sys.argv[1:2] == ["serve"]:
        parser = argparse.ArgumentParser(prog="crew-supervisor serve", description="Serve until SIGTERM.")
        parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file with the settings")
        sys.exit(serve(parser.parse_args(sys.argv[2:]).config))
    from supervisor import cli

    cli.main()


if __name__ == "__main__":
    main()
