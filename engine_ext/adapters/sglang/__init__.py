"""The adapter for SGLang 0.5.23."""
