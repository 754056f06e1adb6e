"""Find the symmetries of a machine."""
