"""From a model that an engine has loaded to a plan of where each checkpoint element is.

`order` is the way from top to bottom. It begins with a `LoadedModel` (`loaded_model`), runs the
engine's loader dry (`trace`), and deals with what the engine did to weights after loading in one of
two ways: elements that were only moved are followed (`permuted`), and what was computed is computed
again by the engine's own code (`recomputed`, `derived`). All other elements are refused by name.

Nothing here writes a sync's values. A failed proof leaves the model as it was; if that cannot be
shown, `TracingError` or `LearningError` keeps the engine from starting.

Imports: `engine_ext.placement` and the rooms below it.
"""

from engine_ext.startup.derived import LaterCopies, Recomputation, Recomputed
from engine_ext.startup.loaded_model import (
    CheckpointReader,
    LoadedModel,
    Reprocessing,
    Traced,
)
from engine_ext.startup.order import (
    agree_on_plan,
    certify_model,
    check_repeatable,
    load_checkpoint,
    plan_model,
    trace_again,
    trace_model,
)
from engine_ext.startup.permuted import (
    BeforeProcessing,
    Processing,
    RepackLearner,
    compose,
)
from engine_ext.startup.recomputed import (
    LockstepRunner,
    Rebuild,
    RebuildError,
    UnprocessedModules,
    apply_to_rows,
    make_unprocessed_model,
    module_place,
    probe_linear,
    with_modules,
)
from engine_ext.startup.trace import (
    COPY_REPLACED,
    LoaderDryRun,
    LoadingTrace,
    LoadWeights,
    young_collections,
)

__all__ = [
    "COPY_REPLACED",
    "BeforeProcessing",
    "CheckpointReader",
    "LaterCopies",
    "LoadWeights",
    "LoadedModel",
    "LoaderDryRun",
    "LoadingTrace",
    "LockstepRunner",
    "Processing",
    "Rebuild",
    "RebuildError",
    "Recomputation",
    "Recomputed",
    "RepackLearner",
    "Reprocessing",
    "Traced",
    "UnprocessedModules",
    "agree_on_plan",
    "apply_to_rows",
    "certify_model",
    "check_repeatable",
    "compose",
    "load_checkpoint",
    "make_unprocessed_model",
    "module_place",
    "plan_model",
    "probe_linear",
    "trace_again",
    "trace_model",
    "with_modules",
    "young_collections",
]
