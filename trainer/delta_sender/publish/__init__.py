"""Deliver the parts of a sync to engines and logs, and keep track of what each of them holds."""
