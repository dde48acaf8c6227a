"""Prefect flows and the midflight command."""
