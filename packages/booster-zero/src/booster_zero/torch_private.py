"""What this package uses of torch beyond its public interface, checked when it is imported."""

from __future__ import annotations

from booster_runtime.sharding import check_names

NAMES = (
    "Tensor._make_wrapper_subclass",
    "Tensor._version",
    "_C._DisableFuncTorch",
    "_C._InferenceMode",
    "_C._current_graph_task_id",
    "_C._set_grad_enabled",
    "_C._storage_Use_Count",
    "_compile._disable_dynamo",
    "_conj",
    "_foreach_mul_",
    "_foreach_zero_",
    "_neg_view",
    "autograd.Variable._execution_engine.queue_callback",
    "utils._pytree",
)

check_names("booster-zero", NAMES)
