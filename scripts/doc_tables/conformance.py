"""The table of the documentation: which loader treatments a receiver carries exactly.

``delta-conformance --markdown`` prints the columns of this project's receivers; the one of vLLM's
own function needs an installed vLLM.
"""

from __future__ import annotations

from engine_ext.conformance import receivers, report, vllm_checkpoint_patch


def default_table() -> str:
    """Return the table of the documentation.

    Raises:
        RuntimeError: vLLM, which has a column there, is not installed.
    """
    try:
        vllm_checkpoint_patch.make()
    except ImportError as error:
        raise RuntimeError("the table of the documentation needs vLLM: use .venv") from error
    own = (receivers.scatter, receivers.masked)
    return report.markdown(report.judge_all((*own, vllm_checkpoint_patch.make)))
