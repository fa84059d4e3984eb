"""HTTP server: OpenAI-compatible, streaming over server-sent events."""
