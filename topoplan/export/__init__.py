"""Plans and machines as files for other programs: NCCL's topology and graph files."""
