"""Read machines and measurements: listings of tools, logs, topology files, and the probe of this machine."""
