"""Tokens per step, draft cost and speed of drafters by task."""
