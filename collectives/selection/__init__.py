"""Choosing the largest entries of a gradient: exactly, as published, and with error feedback."""
