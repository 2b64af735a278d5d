"""The adapter for SGLang; `features` has the supported versions."""
