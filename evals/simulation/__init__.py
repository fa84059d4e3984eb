"""Adaptive control on machines that are simulated."""
