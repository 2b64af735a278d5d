"""Find what a trainer has changed: new tensors are compared, bit by bit, with the snapshot."""
