"""Low-latency LLM serving with speculative decoding that never changes the answer."""
