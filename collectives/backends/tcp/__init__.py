"""Ranks in processes of their own, joined by TCP connections: what a user without MPI has."""
