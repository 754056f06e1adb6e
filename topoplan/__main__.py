"""``python -m topoplan``: the same as the command ``topoplan``."""

import sys

from topoplan.cli.main import main

sys.exit(main())
