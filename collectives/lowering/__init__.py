"""From a plan to the table of transfers that back ends run, and its check."""
