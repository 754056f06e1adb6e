"""One page that says what a machine can do: the machine, what is wrong with it, the plan, its proof, times over sizes."""
