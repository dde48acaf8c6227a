"""Samplers: when a batch may be dispatched, and which finished groups a train step takes."""
