"""Take an engine for CUDA to a GPU host without network: make a bundle here, unpack it there."""
