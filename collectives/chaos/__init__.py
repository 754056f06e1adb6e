"""Ranks that are killed, stopped, slowed and started anew at random, while every element of every result is checked."""
