"""Training programs to start from."""
