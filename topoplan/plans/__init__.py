"""The plan, its file formats and its independent check."""
