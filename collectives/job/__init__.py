"""The plan of a job: its ranks say where they are, each host is probed once, one plan serves all."""
