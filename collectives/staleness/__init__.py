"""How far ranks may be apart: the modes by one clock rule, and the mailbox by which late gradients come."""
