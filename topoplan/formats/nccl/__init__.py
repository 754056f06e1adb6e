"""NCCL's topology file (NCCL_TOPO_DUMP_FILE)."""
