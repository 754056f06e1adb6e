"""What NCCL runs by itself on one server: rings and chains in equal channels, the rival of packed trees."""
