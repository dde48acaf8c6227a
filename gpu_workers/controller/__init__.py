"""The single controller's parts: no torch, vLLM or Prefect."""
