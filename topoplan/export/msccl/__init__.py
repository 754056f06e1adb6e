"""Algorithms of MSCCL (XML): connections of trees in channels, and the file."""
