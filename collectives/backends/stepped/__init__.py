"""What back ends share that run a table in steps: what moves in each of them, and where it lies."""
