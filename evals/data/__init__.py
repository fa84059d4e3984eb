"""Questions and recorded answers that evals run on."""
