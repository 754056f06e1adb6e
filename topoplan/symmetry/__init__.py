"""Permutation groups of an allocation, found and reduced to what a packing needs."""
