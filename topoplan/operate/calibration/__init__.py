"""Measure a machine: fit copies between GPUs, write measured links into a topology, and plan and judge pair tests."""
