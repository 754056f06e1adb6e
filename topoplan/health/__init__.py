"""Is a machine healthy: what is amiss in it, what it should be, and what that costs."""
