"""Turn what has changed into the parts of a sync, while more is being compared."""
