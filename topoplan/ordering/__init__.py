"""In which order ranks and nodes go: what an order costs, the best one, and the axes of a mesh on the wires."""
