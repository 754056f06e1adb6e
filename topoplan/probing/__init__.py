"""This machine: what the NVIDIA driver and Linux say of it, as a Topology."""

from __future__ import annotations

from topoplan.probing.probe import probe

__all__ = ["probe"]
