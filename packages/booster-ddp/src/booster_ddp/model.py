"""`DDPModel`: runs the user's model through torch's ``DistributedDataParallel``, which is built again at need."""

from __future__ import annotations

import contextlib
import copy
import warnings
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from booster_core.errors import ConfigError, GradientError
from booster_core.plugin import ModelWrapper
from booster_ddp._torch_private import (
    follow_outputs,
    not_compiled,
    not_compiled_itself,
    release,
    send_buffers,
)
from booster_ddp.config import BY_DTYPE, register_comm_hook, restart_comm_hook
from booster_ddp.gradients import UnreducedGradients
from booster_runtime.data import hidden_tensors, move_batch, tensors_of
from booster_runtime.sharding import refuse_all_gradients, watch_gradient_hooks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from booster_core.plugin import BoostContext
    from booster_core.precision import PrecisionPolicy
    from booster_ddp.config import DDPConfig

_DEFAULT_BUCKET_CAP_MB = 25  # torch's
_OWN_BUFFERS = {"broadcast_buffers": False}


class DDPModel(ModelWrapper):
    """The user's model, run by a ``DistributedDataParallel`` that is built again where it no longer fits.

    `module` is the user's model; torch's wrapper is `ddp`, outside of the module tree. It is built at once, and again
    in the first forward after parameters were frozen or unfrozen, or after a step that has shown that it must search
    for unused parameters. A DDP is thrown away only between backward passes: one whose gradients it was to average
    would leave them as they are, and those count as not averaged (`UnreducedGradients`).

    Args:
        module: The user's model, on its device.
        config: Options of the plugin.
        context: Of the ``boost``.
        has_optimizer: The model is boosted with an optimizer. Without one, nothing tells where a step ends: DDP always
            searches, unless ``find_unused_parameters=False``.

    Attributes:
        ddp: torch's wrapper; ``None`` while no parameter is trained.
        gradients: Tracks the gradients that it does not average.
        accumulates: Whether this is under `no_sync`.

    Collective: every rank of the world; rank 0's values are broadcast.
    """

    ddp: DistributedDataParallel | None

    def __init__(self, module: nn.Module, config: DDPConfig, context: BoostContext, *, has_optimizer: bool) -> None:
        super().__init__(module, precision=context.precision)
        self._config = config
        self._context = context
        self._comm_hook = config.comm_hook or BY_DTYPE.get(context.precision.reduce_dtype)
        asked = False if config.static_graph else config.find_unused_parameters
        if asked is None and not self.sends_gradients:
            asked = False  # the reducer alone calls such a hook, which is to average the first step, too
        self._asked = True if asked is None and not has_optimizer else asked
        self._search = self._asked
        self.accumulates = False
        self._held = [
            (owner._parameters, name, parameter)  # noqa: SLF001 - the dictionary that holds it
            for owner in module.modules()
            for name, parameter in owner.named_parameters(recurse=False)
        ]
        # At each step, which all ranks take, and not before each forward: some ranks may evaluate alone.
        self._sends_buffers = config.broadcast_buffers and has_optimizer and any(True for _ in module.buffers())
        self._built_for: list[bool] | None = None
        self._was_built = False
        self._set_ddp(None)
        self.gradients = UnreducedGradients(
            self,
            context,
            bucket_bytes=int((config.bucket_cap_mb or _DEFAULT_BUCKET_CAP_MB) * 2**20),
            communication_dtype=self.communication_dtype,
            can_wait=has_optimizer,
        )
        self._fit_ddp()

    @property
    def sends_gradients(self) -> bool:
        """Whether DDP sends the gradients themselves; compression hooks without a format send something else."""
        return self._comm_hook in (None, "allreduce") or self.communication_dtype is not None

    @property
    def communication_dtype(self) -> torch.dtype | None:
        """The format that a compression hook by name sends gradients in; ``None`` for their own."""
        return next((dtype for dtype, name in BY_DTYPE.items() if name == self._comm_hook), None)

    def held_tensors(self) -> Iterator[Tensor]:
        """Yield what `ModelWrapper.held_tensors` does, without gradients that are views of torch's buckets."""
        kept = [each.grad for each in self.parameters()] if self._config.gradient_as_bucket_view else []
        are_views = {id(gradient) for gradient in kept}
        return (tensor for tensor in super().held_tensors() if id(tensor) not in are_views)

    @not_compiled_itself
    def run_module(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's model in DDP's forward.

        Raises:
            ConfigError: If DDP can't follow the graph from the outputs, or ranks train different parameters.
            GradientError: If ``static_graph`` has no synchronized backward to learn from.

        Collective: every rank of the world, where buffers are broadcast, or other parameters are trained than before.
        """
        if not torch.is_grad_enabled() or (ddp := self._prepare()) is None:
            device = self._context.device
            if device.type != "cpu":  # as DDP does with what it is given
                args, kwargs = move_batch((args, kwargs), device)
            return self.module(*args, **kwargs)
        output = ddp(*args, **kwargs)
        self._follow(ddp, output)
        return output

    @not_compiled
    def _prepare(self) -> DistributedDataParallel | None:
        """Return the DDP for a forward that records a graph; ``None`` for one that goes without.

        That is one with other tensors in place of the parameters, as of ``torch.func.functional_call``: DDP would wait
        without end. What `Booster.backward` makes of its results is averaged in the step.
        """
        for held, name, parameter in self._held:  # a generator would be a call for each
            if held.get(name) is not parameter:
                return None
        self._fit_ddp()
        if self.ddp is None:
            return None
        watch_gradient_hooks(self.gradients.trained.items(), num_own=1)
        self.gradients.before_forward(self.ddp, accumulates=self.accumulates)
        if self.ddp.static_graph and self.accumulates and not self.gradients.has_reduced:
            msg = (
                "`static_graph=True` learns the graph from the first backward that is averaged, so no backward can run "
                "under `no_sync` before it. Run the first step without accumulation, or leave the option out."
            )
            raise GradientError(msg)
        return self.ddp

    @not_compiled
    def _follow(self, ddp: DistributedDataParallel, output: Any) -> None:
        """Let DDP see all outputs, and note its part in the next backward."""
        if ddp.static_graph:
            _refuse_hidden(output)
        elif ddp.find_unused_parameters:
            _follow_hidden(ddp, output)
        elif self._search is None and _has_reentrant(output):  # each of whose layers runs a backward of its own
            self._search = False
        self.gradients.after_forward(ddp)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on this rank; the next backward of a forward outside of this context averages them."""
        before = self.accumulates
        self._set_accumulates(accumulates=True)
        try:
            yield
        finally:
            self._set_accumulates(accumulates=before)

    def after_step(self) -> None:
        """Send rank 0's buffers; decide after the first step whether DDP is to search for unused parameters.

        Collective: every rank of the world, where there are buffers, and in the first step; else none.
        """
        has_averaged = self.gradients.end_step()
        if self._sends_buffers and self.ddp is not None:
            send_buffers(self.ddp)
        if has_averaged and self._search is None:
            some_unused = torch.tensor(int(self.gradients.some_unused), device=self._context.device)
            dist.all_reduce(some_unused, dist.ReduceOp.MAX)
            self._search = bool(some_unused)

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelWrapper:
        """Return a copy to evaluate with, such as an average: it has this model's values, and no optimizer."""
        module = copy.deepcopy(self.unwrap(), memo)
        refuse_all_gradients(module)
        copied = _wrapped(module, self.precision, self.training)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle, as by ``torch.save``, a plain wrapper of the user's model, which is whole here."""
        del protocol
        return _wrapped, (self.unwrap(), self.precision, self.training)

    def _set_ddp(self, ddp: DistributedDataParallel | None) -> None:
        self.__dict__["ddp"] = ddp  # past `nn.Module`, which would take it for a part of this model

    def _set_accumulates(self, *, accumulates: bool) -> None:
        self.accumulates = accumulates
        if self.ddp is not None:
            self.ddp.require_backward_grad_sync = not accumulates

    def _fit_ddp(self) -> None:
        """Build DDP, or build it again, if it does not fit what is trained now and what is known of the graph."""
        trained = [parameter.requires_grad for parameter in self.gradients.named.values()]
        if trained != self._built_for:
            if self._built_for is not None:
                self._leave_trained()
            self._built_for = trained
            self._search = self._asked
            self._build_ddp()
        elif self.ddp is not None and (
            (self._search and not self.ddp.find_unused_parameters)
            or self.gradients.is_cut_off
            or self.gradients.is_given_up(accumulates=self.accumulates)
            # In its first backward, a static graph does not tell whether it is reached.
            or (self.ddp.static_graph and not self.gradients.has_reduced and self._nodes != self._trained_nodes())
        ):
            self._build_ddp()

    def _trained_nodes(self) -> list[Any]:
        """Return the nodes of the graph that accumulate gradients, on which DDP's hooks hang."""
        with torch.enable_grad():
            views: list[Any] = [each.view_as(each) for each in self.gradients.trained.values()]
        return [view.grad_fn.next_functions[0][0] for view in views]

    def _leave_trained(self) -> None:
        """Settle the gradients of the parameters that were trained so far, before others are.

        Collective: every rank of the world.
        """
        self._context.coordinator.agree(
            "forward with other trained parameters than before",
            {"trained parameters": [name for name, each in self.gradients.named.items() if each.requires_grad]},
            remedy="Freeze and unfreeze the same parameters on all ranks.",
        )
        if self.gradients.exist:
            self.gradients.average()

    def _build_ddp(self) -> None:
        """Build torch's DDP in place of the present one.

        Collective: every rank of the world, the first time; else none.
        """
        if self.ddp is not None:
            release(self.ddp)
            restart_comm_hook(self._config.comm_hook_state)
        self._set_ddp(None)
        trained = {name: each for name, each in self.gradients.named.items() if each.requires_grad}
        self.gradients.begin(trained, averages_at_end=self._search is None)
        if not trained:  # such as a frozen teacher, which DDP refuses
            return
        config, device = self._config, self._context.device
        options: dict[str, Any] = {} if config.broadcast_buffers and not self._sends_buffers else _OWN_BUFFERS
        with warnings.catch_warnings():
            # torch 2.13 deprecates this option in favor of `forward_sync_buffers`, which torch 2.10 does not have, and
            # which still broadcasts rank-local buffers at the start.
            warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated", category=FutureWarning)
            ddp = DistributedDataParallel(
                self.module,
                device_ids=None if device.type == "cpu" else [device],
                init_sync=not self._was_built,
                bucket_cap_mb=config.bucket_cap_mb,
                find_unused_parameters=bool(self._search),
                gradient_as_bucket_view=config.gradient_as_bucket_view,
                static_graph=config.static_graph,
                **options,
            )
        if self._comm_hook is not None:
            register_comm_hook(ddp, self._comm_hook, config.comm_hook_state)
        ddp.require_backward_grad_sync = not self.accumulates
        self._set_ddp(ddp)
        if self._sends_buffers and not self._was_built:
            send_buffers(ddp)
        self._was_built = True
        self._nodes = self._trained_nodes() if config.static_graph else []


def _follow_hidden(ddp: DistributedDataParallel, output: Any) -> None:
    """Let DDP's search see the tensors of outputs that it does not look into, and keep DDP for their backward.

    DDP's outputs hold a weak reference to it, which backward needs, also where another DDP has taken its place since.
    """
    tensors = [tensor for _, tensor in tensors_of(output)]
    if ddp.require_backward_grad_sync and any(each.requires_grad for each in hidden_tensors(output)):
        follow_outputs(ddp, tensors)
    node = next((each.grad_fn for each in pytree.tree_leaves(output) if _has_graph(each)), None)
    if node is not None:
        node.metadata["ddp"] = ddp


def _has_reentrant(output: Any) -> bool:
    """Return whether a graph has layers that are checkpointed with ``use_reentrant=True``."""
    nodes = [tensor.grad_fn for _, tensor in tensors_of(output) if tensor.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if type(node).__name__ == "CheckpointFunctionBackward":
            return True
        found = {each for each, _ in node.next_functions if each is not None} - seen
        seen |= found
        nodes.extend(found)
    return False


def _has_graph(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None


def _refuse_hidden(output: Any) -> None:
    """Refuse outputs in which DDP does not find the tensors at which it starts the first reduction of a static graph.

    Raises:
        ConfigError: If there are some.
    """
    if any(tensor.requires_grad for tensor in hidden_tensors(output)):
        msg = (
            f"The model returns a `{type(output).__name__}`, in which DDP finds no tensors. `static_graph=True` needs "
            "them: without, gradients would not be averaged. Return tensors in a dict, list or tuple, or leave the "
            "option out."
        )
        raise ConfigError(msg)


def _wrapped(module: nn.Module, precision: PrecisionPolicy | None, training: bool) -> ModelWrapper:  # noqa: FBT001 - in pickles
    """Return a plain wrapper of a model, in the mode in which the boosted model was."""
    wrapper = ModelWrapper(module, precision=precision)
    wrapper.training = training
    return wrapper
