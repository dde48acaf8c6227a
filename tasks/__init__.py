"""One retryable call each, named by number."""
