"""Exact linear programming: a rational simplex, guided by one in floating point."""
