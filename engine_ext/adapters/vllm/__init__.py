"""The adapter for vLLM (written against 0.32)."""
