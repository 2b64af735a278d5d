"""Record what a redesign must not change: staged writes and posted bodies."""
