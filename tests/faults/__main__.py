"""``python -m tests.faults recovery ...`` runs `tests.faults.recovery`, whose ranks load it under its own name."""

from __future__ import annotations

import sys

from tests.faults.recovery import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[2:]))
