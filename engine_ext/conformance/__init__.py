"""The conformance suite: what becomes of a sync, for each way in which a loader treats a weight.

`cases` has small models, one for each treatment (`toy_models`, `models`, `quantised`, `sharded`),
and `syncs` what each is given. `judge` serves a model with a receiver (`subject`, `receivers`),
applies a sync and compares all memory with that of a fresh model. `installed` does the same with a
model that an installed engine loads, and `report` makes tables. ``delta-conformance``, which is in
`engine_ext.cli`, is their command.

Imports: every room of `engine_ext` below the adapters. No part of a receiver imports it.
"""

__all__: list[str] = []
