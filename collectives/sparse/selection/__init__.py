"""Select the entries of largest magnitude: exactly, by MSTopK, or by a threshold; on the host and on a GPU."""
