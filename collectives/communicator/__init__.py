"""The collectives as their callers see them: the communicator, and handles of those in the background."""
