"""The command line."""

from topoplan.cli.main import main

__all__ = ["main"]
