"""Drafters: cheap guessers that return draft trees for the target model to verify."""
