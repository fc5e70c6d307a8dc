"""Names of torch that are not public: packages list those that they use, and check them when they are imported."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING

import torch
import torch.distributed

if TYPE_CHECKING:
    from collections.abc import Iterable

NAMES = (
    "Tensor._is_view",
    "Tensor._make_wrapper_subclass",
    "Tensor._version",
    "_C._ExcludeDispatchKeyGuard",
    "_C._autograd._get_current_graph_task_keep_graph",
    "_C._autograd._pop_saved_tensors_default_hooks",
    "_C._autograd._push_saved_tensors_default_hooks",
    "_C._autograd._saved_tensors_hooks_is_enabled",
    "_C._autograd._top_saved_tensors_default_hooks",
    "_C._disabled_torch_function_impl",
    "_C._dispatch_get_all_op_names",
    "_C._dispatch_key_parse",
    "_C._dispatch_keys",
    "_C._get_privateuse1_backend_name",
    "_C._get_schema",
    "_compile._disable_dynamo",
    "_foreach_copy_",
    "_foreach_lerp_",
    "_ops",
    "distributed.distributed_c10d._is_barrier_after_init",
    "distributed.distributed_c10d._process_group_color",
    "distributed.distributed_c10d._world",
    "nn.init._no_grad_trunc_normal_",
    "nn.modules.batchnorm._NormBase",
    "nn.modules.conv._ConvNd",
    "utils._python_dispatch._disable_current_modes",
    "utils._pytree",
    "utils.data._utils.worker._worker_info",
)
"""What this package uses."""


def check_names(package: str, names: Iterable[str]) -> None:
    """Check that torch has the private names that a package uses.

    Args:
        package: The distribution, for the error.
        names: Dotted names below ``torch``.

    Raises:
        ImportError: If it lacks one.
    """
    missing = []
    for name in names:
        try:
            attrgetter(name)(torch)
        except AttributeError:
            missing.append(f"torch.{name}")
    if missing:
        msg = (
            f"{package} does not know torch {torch.__version__}, which has no {', '.join(missing)}. Use a version "
            f"of torch from 2.10 to 2.15, or a later release of {package}."
        )
        raise ImportError(msg)


check_names("booster-runtime", NAMES)
