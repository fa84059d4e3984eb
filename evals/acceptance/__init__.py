"""Tokens per step, acceptance and speed of drafters, by task."""
