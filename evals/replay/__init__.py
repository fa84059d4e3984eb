"""Recorded answers replayed through the engine without its target, to score model-free drafters."""
