"""Drafters that come with the project."""
