"""The engine adapters: the only modules that know an engine. Each imports it inside functions."""
