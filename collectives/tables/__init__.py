"""Transfer tables, and the arrays and compiled kernels that they work on."""
