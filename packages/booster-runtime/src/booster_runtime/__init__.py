"""The toolkit that strategies are made of: collectives, sharding, data, lazy models, the monitor, adapters.

The names of this package are for users. Its sub-packages are for authors of strategies, and may change with each minor
version. Public names are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from booster_core.lazy_import import public_names

if TYPE_CHECKING:
    from booster_runtime.activations import disable_activation_checkpointing, enable_activation_checkpointing
    from booster_runtime.compiling import compile_layers
    from booster_runtime.data.batches import to_device
    from booster_runtime.data.metrics import gather_for_metrics, reduce
    from booster_runtime.data.mixing import MixedStreams
    from booster_runtime.data.packing import FirstFitDocuments, PackedDocuments, cu_seq_lens, document_mask
    from booster_runtime.exported_tensors import whole_parameters
    from booster_runtime.lazy import LazyInitContext
    from booster_runtime.loops import Evaluation, StopSignal, accumulate, evaluate_batch, join, train_batch
    from booster_runtime.moving_average import ema
    from booster_runtime.muon import Muon
    from booster_runtime.offloading import offload_states, reload_states
    from booster_runtime.replicas import check_replicas
    from booster_runtime.vocabulary_loss import enable_linear_cross_entropy, linear_cross_entropy
    from booster_runtime.whole_tensors import full_gradient, full_state, gathered, set_full_gradient, set_full_state

__all__ = [
    "Evaluation",
    "FirstFitDocuments",
    "LazyInitContext",
    "MixedStreams",
    "Muon",
    "PackedDocuments",
    "StopSignal",
    "accumulate",
    "check_replicas",
    "compile_layers",
    "cu_seq_lens",
    "disable_activation_checkpointing",
    "document_mask",
    "ema",
    "enable_activation_checkpointing",
    "enable_linear_cross_entropy",
    "evaluate_batch",
    "full_gradient",
    "full_state",
    "gather_for_metrics",
    "gathered",
    "join",
    "linear_cross_entropy",
    "offload_states",
    "reduce",
    "reload_states",
    "set_full_gradient",
    "set_full_state",
    "to_device",
    "train_batch",
    "whole_parameters",
]

__getattr__, __dir__ = public_names(__name__)
