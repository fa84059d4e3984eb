"""Comparing two runs of one measurement."""
