"""The runtime: the single controller and its workers."""
