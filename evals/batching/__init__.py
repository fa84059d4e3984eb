"""Static, dynamic and continuous batching over one distribution of lengths."""
