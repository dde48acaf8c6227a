"""Tasks: prompts that are pure functions of a seed, and their scores."""
