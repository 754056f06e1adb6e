"""``python -m tests.faults BACKEND --kills 200``: kills or stops ranks at random and looks at what the others say."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path


def main() -> int:
    """Run the loop of the back end that is named."""
    known = sorted(path.stem for path in Path(__file__).parent.glob("[a-z]*.py"))
    if len(sys.argv) < 2 or sys.argv[1] not in known:
        print(f"name a back end: {', '.join(known)}", file=sys.stderr)
        return 2
    status: int = importlib.import_module(f"tests.faults.{sys.argv[1]}").main(sys.argv[2:])
    return status


if __name__ == "__main__":  # ranks that are started load this module too
    sys.exit(main())
