"""A machine as data: devices and links, hosts, clusters, faults, and the capacities between ranks."""
