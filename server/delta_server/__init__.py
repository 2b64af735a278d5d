"""The HTTP side of delta updates: endpoints, spool and orchestration, the same for all engines."""
