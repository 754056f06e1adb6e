"""One page on a machine: links, what is amiss, which GPUs to take, the plan with its proof, times over sizes."""
