"""`HybridModel`: the user's model, of which this rank may hold some layers, and some of each layer."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from booster_core.errors import ConfigError
from booster_core.plugin import through_guard
from booster_core.ranks import NamedCall
from booster_hybrid.mesh import refuse_copy
from booster_runtime.model_methods import refuse_pickle
from booster_zero import ShardedModel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from booster_hybrid.mesh import Axis
    from booster_hybrid.pipeline.engine import PipelineEngine
    from booster_hybrid.pipeline.stages import StageMap
    from booster_hybrid.random_streams import SplitStreams
    from booster_hybrid.same_training import RequiresGradCheck
    from booster_hybrid.state import LocalModel
    from booster_hybrid.weight_reads import DirectWeightUses


class HybridModel(ShardedModel):
    """The user's model, whose parameters are views of buckets; see `ShardedModel`.

    Args:
        module: The user's model, split.
        local: What of the model this rank holds.
        replica: The ranks that work on the same batches.
        callers: The ranks that take part in a forward together: these, and those that experts are spread over.
        streams: Lets tensor parallel ranks draw alike what they compute alike; ``None`` without such.
        trained_alike: Compares batches, and what ranks train that work on the same; ``None`` where nobody else does.
        outside_reads: Looks at losses; ``None`` where each rank has whole parameters.
        stages: Which rank of the pipeline holds which tensors; ``None`` where there is none.
        make_engine: Makes what takes batches through the pipeline; ``None`` where there is none.
        **kwargs: As for `ShardedModel`.

    Attributes:
        engine: What was made.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        local: LocalModel,
        replica: Axis,
        callers: Axis,
        streams: SplitStreams | None = None,
        trained_alike: RequiresGradCheck | None = None,
        outside_reads: DirectWeightUses | None = None,
        stages: StageMap | None = None,
        make_engine: Callable[[HybridModel], PipelineEngine] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(module, **kwargs)
        self.local, self.replica, self.callers = local, replica, callers
        self.streams, self.stages = streams, stages
        self.trained_alike, self.outside_reads = trained_alike, outside_reads
        self.engine = None if make_engine is None else make_engine(self)

    def __deepcopy__(self, memo: object) -> NoReturn:
        """Refuse a copy, which would share the optimizer and the ranks of this one.

        Raises:
            ConfigError: Always.
        """
        refuse_copy()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse to be pickled, as by ``torch.save``.

        Raises:
            CheckpointError: Always.
        """
        refuse_pickle()

    @contextlib.contextmanager
    def whole_parameters(self, *, writes: bool = False) -> Iterator[None]:
        """Have all parameters whole for a block, as `ShardedModel.whole_parameters` does, where no layer is split.

        Args:
            writes: Keep what the block writes into them.

        Raises:
            ConfigError: If tensor or expert parallel ranks, or stages, have parts of the model.
        """
        if self.local.splits or self.local.expert_splits or self.stages is not None:
            msg = (
                "Each rank has a part of the model's layers, so that `whole_parameters` can't have all of them whole "
                "here. Take those that you need by their names: `from booster_runtime import gathered`, and "
                "`with gathered(booster, model, names, writes=True) as tensors:` on every rank."
            )
            raise ConfigError(msg)
        with super().whole_parameters(writes=writes):
            yield

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; floating outputs of a narrow compute format come back in the policy's ``output_dtype``.

        Raises:
            ConfigError: If the model is cut into pipeline stages, or the ranks that work on one batch together are
                given different ones, or train different parameters.
            MissingRanksError: If some of the ranks that take part do not make the call.

        Collective: the tensor, sequence and expert parallel ranks.
        """
        if self.engine is not None:
            msg = (
                "The model is cut into pipeline stages, so that it can't be called by itself. Run batches through "
                "`booster.execute_pipeline(data_iter, model, criterion, optimizer)`; without an optimizer it evaluates."
            )
            raise ConfigError(msg)
        if self.callers.size == 1:
            return super().forward(*args, **kwargs)
        if torch.compiler.is_compiling():
            return self._compiled(*args, **kwargs)
        # Replicas may evaluate on more or fewer batches than others: only these ranks wait for each other.
        with NamedCall("forward", self.callers.ranks):
            if self.trained_alike is not None:
                self.trained_alike.check((args, kwargs))
            reads = self.outside_reads if torch.is_grad_enabled() else None
            if reads is not None:
                reads.begin()
            outputs = self._train(*args, **kwargs) if self.module.training else self._forward(*args, **kwargs)
            if reads is not None:
                reads.end()
            return outputs

    def _train(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model in training mode.

        Collective: the ranks that work on the same batches.
        """
        if self.streams is not None:
            self.streams.begin()
        outputs = self._forward(*args, **kwargs)
        if self.streams is not None:
            self.streams.end()
        return outputs

    def _compiled(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model where all of it is in a graph: what ranks exchange in each forward is between graphs."""
        if self.streams is None or not self.module.training:
            return super().forward(*args, **kwargs)
        self.streams.begin()
        outputs = super().forward(*args, **kwargs)
        self.streams.end()
        return outputs

    @through_guard
    def run_stage(self, *args: Any, **kwargs: Any) -> Any:
        """Run the active stage in the run's number formats.

        Collective: the tensor parallel ranks.
        """
        return self._run(*args, **kwargs)
