"""LARS and LAMB for plain loops, with norms that ranks compute for each other."""

from collectives.optimisers.layer_optimiser import Lamb, Lars

__all__ = ["Lamb", "Lars"]
