"""The commands of topoplan that move data; `topoplan.cli` finds them by the entry points of this package."""
