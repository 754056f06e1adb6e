"""Benchmarks, calibration, fault injection, a testbed of shaped links, and the commands that start them."""
