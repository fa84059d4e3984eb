"""Whether speculation changes the answer, token by token or in distribution."""
