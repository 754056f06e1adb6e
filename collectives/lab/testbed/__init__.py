"""A network of shaped links on one machine, on which plans run with real processes."""
