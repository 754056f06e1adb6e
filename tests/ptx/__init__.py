"""PTX of kernels, run on this processor with everything checked that a GPU does not tell."""
