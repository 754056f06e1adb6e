"""The control plane: membership, control messages and failure attribution, over a rendezvous, MPI or shared memory."""
