"""Training of drafters on what the target itself wrote."""
