"""The adapter for vLLM; `features` has the supported versions."""
