"""Cheapest trees: arborescences, spanning trees, hop-constrained trees, shortest paths."""
