"""Generators: a vLLM engine as an actor that captures exact tokens, log-probabilities and weight versions."""
