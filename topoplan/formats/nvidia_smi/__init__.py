"""What ``nvidia-smi`` prints: the matrix of ``topo -m`` and the states and speeds of ``nvlink``."""
