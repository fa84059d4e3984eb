"""A client of any OpenAI-compatible server, which notes when tokens arrive."""
