"""What Slurm says of a network: topology.conf, topology.yaml, and the lists of names in both."""
