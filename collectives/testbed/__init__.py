"""A network of shaped links on this machine, on which plans run with real processes; `topoplan testbed` drives it."""
