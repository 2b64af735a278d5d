"""Plug into trainers; each module imports its trainer.

`transformers_callback`, `trl_trainers`, `verl_checkpoint_engine`, and `vllm_transfer` with
`transfer_destination`, which imports no engine.
"""
