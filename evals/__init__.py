"""Measurements from the command line: acceptance, losslessness, latency."""
