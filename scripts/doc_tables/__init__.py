"""Reference tables of the documentation, written from the code that they describe."""
