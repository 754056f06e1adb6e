"""All ranks of a plan on one GPU."""
