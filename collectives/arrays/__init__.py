"""The kinds of arrays that collectives work on."""
