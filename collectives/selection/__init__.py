"""Selection of the entries of largest magnitude, exact and approximate, on processors and GPUs."""
