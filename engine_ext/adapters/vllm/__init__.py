"""The adapter for vLLM (written against 0.32)."""

__all__: list[str] = []
