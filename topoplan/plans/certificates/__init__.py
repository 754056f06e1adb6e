"""Certificates of bounds, one module for each family of kinds; importing them registers the kinds."""

__all__ = ["certificate", "exchange"]
