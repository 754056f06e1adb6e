"""Upper bounds on the rate of a collective: maximum flows, cuts, partitions, flows of quotients."""
