"""Environments that come with Midflight."""
