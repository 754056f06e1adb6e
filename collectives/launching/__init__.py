"""Starting a process for each rank on this host, by ourselves or through MPI's launcher."""
