"""Plug into trainers: `transformers_callback`, `trl_trainers`. Each imports its trainer."""
