"""One module for each of ``delta-plan``, ``delta-log``, ``delta-top`` and ``delta-conformance``.

Imports: any room of `engine_ext`, inside of functions if it is an adapter. Nobody imports this.
"""

__all__: list[str] = []
