"""Certificates of bounds, one module for each family of kinds; importing them registers the kinds."""

from topoplan.plans.certificates import certificate, exchange, steiner

__all__ = ["certificate", "exchange", "steiner"]
