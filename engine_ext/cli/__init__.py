"""One module for each console script: ``delta-plan``, ``delta-log`` and ``delta-top``.

Imports: any room of `engine_ext`, inside of functions if it is an adapter. Nobody imports this.
"""

__all__: list[str] = []
