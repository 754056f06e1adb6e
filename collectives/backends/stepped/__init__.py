"""What back ends share that run a table in steps: when each row runs, and where its chunk lies."""
