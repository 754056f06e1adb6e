"""All ranks in one process."""
