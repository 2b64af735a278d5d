"""The adapter for SGLang 0.5.23."""

__all__: list[str] = []
