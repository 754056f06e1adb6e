"""Meters: what times copies on the machine that it runs on."""

from collectives.calibration.peer_copies import PeerCopies

__all__ = ["PeerCopies"]
