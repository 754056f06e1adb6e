"""The packing problem as a linear program over trees, which are priced and added as they are needed."""
