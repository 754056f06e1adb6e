"""Fixtures of commands."""

from tests.topoplan.cli.conftest import done as done
from tests.topoplan.cli.conftest import run as run
from tests.topoplan.cli.conftest import told as told
