"""One process per rank, started by MPI: shared memory within a host, messages between hosts."""
