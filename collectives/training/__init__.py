"""Inside the training loop: gradients exchanged by plans, from plain loops and from torch."""
