"""Compute plans: trees, packings, bounds and their certificates."""
