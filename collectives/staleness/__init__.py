"""Averages of late gradients: SSP, ASP and local SGD, by one clock rule."""
