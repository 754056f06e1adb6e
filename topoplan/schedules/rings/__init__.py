"""Rings as forests: around a server, across servers, and which order they take."""
