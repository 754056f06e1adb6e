"""The control plane: who is there, what they say, who is to blame; over a rendezvous, MPI, a store or shared memory."""
