"""Draw machines, trees, charts and the report page."""
