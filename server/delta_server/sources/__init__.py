"""Sources: the ways by which versions get to an engine."""
