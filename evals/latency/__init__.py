"""One stream: steps and answers against floors and peers."""
