"""Packing programs: an exact simplex, alone or guided by one in floating point."""
