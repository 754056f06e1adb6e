"""LARS and LAMB for plain loops, with norms that ranks compute for each other."""
