"""Plug into trainers and what they run on; each module imports it.

`transformers_callback`, `trl_trainers`, `verl_checkpoint_engine`, and `vllm_transfer` with
`transfer_destination`, which imports no engine. `ray_transport` reaches engines in a Ray cluster.
"""
