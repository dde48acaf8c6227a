"""Parts, manifests, checkpoints and traces on any fsspec store."""
