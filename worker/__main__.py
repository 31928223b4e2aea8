"""``python -m worker FD``: a template or standby process; started by the supervisor only."""

from __future__ import annotations

import sys

from worker.template import main

if __name__ == "__main__":
    main(int(sys.argv[1]))
