"""Ranks and links of an allocation, its servers, and both as a labelled graph."""
