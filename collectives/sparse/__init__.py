"""Sparse gradients among ranks: selection of entries, their encoding, and their exchange."""
