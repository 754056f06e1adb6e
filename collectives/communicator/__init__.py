"""The collectives as their callers see them: requests, arguments, execution, handles."""
