"""Sparse gradients among ranks: what each gives of its own, how it travels, and what it costs."""
