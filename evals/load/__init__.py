"""Servers under load, as their clients see them."""
