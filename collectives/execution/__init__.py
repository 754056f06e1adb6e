"""One collective on the way to a back end: checked arguments, a plan, a chunk size, memory."""
