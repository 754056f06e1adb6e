"""Operate a machine: diagnose and calibrate it, compare allocations, place ranks, and draw reports."""
