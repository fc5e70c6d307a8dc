"""`FSDPModel`: wraps the sharded model.

Outside of a call, modules hold sharded parameters, whose values count; while they run, they hold gathered copies.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from booster_core.errors import ConfigError
from booster_core.plugin import ModelWrapper, through_guard
from booster_core.ranks import NamedCall
from booster_fsdp._torch_private import graph_task
from booster_fsdp.parameters import refuse_hook, whole_of
from booster_runtime.data import tensors_of
from booster_runtime.model_methods import refuse_pickle
from booster_runtime.sharding import generate_together, local_of, send_first, sharded_like

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from booster_core.precision import PrecisionPolicy
    from booster_fsdp.gradients import ShardedGradients


class FSDPModel(ModelWrapper):
    """Wrap a model that was sharded in place.

    Args:
        module: The user's model.
        gradients: Finishes its gradients.
        precision: What autocast applies; ``None`` for none.
        forward_methods: Methods other than ``forward`` that run with gathered parameters.
    """

    gradients: ShardedGradients
    lays_out = True
    replaces_parameters = True
    gathers_in_forward = True

    def __init__(
        self,
        module: nn.Module,
        *,
        gradients: ShardedGradients,
        precision: PrecisionPolicy | None,
        forward_methods: Sequence[str],
    ) -> None:
        super().__init__(module, precision=precision)
        self.__dict__["gradients"] = gradients
        self.__dict__["_held"] = [
            (inner._parameters, name, parameter)  # noqa: SLF001 - the dictionary that holds it
            for inner in module.modules()
            for name, parameter in inner._parameters.items()  # noqa: SLF001
            if isinstance(parameter, DTensor)
        ]
        # `torch.distributed.checkpoint` asks for it next to `named_buffers`, which lists the user's.
        self.__dict__["_non_persistent_buffers_set"] = module._non_persistent_buffers_set  # noqa: SLF001
        self.__dict__["_forward_methods"] = frozenset(forward_methods)
        generate_together(self)

    def __deepcopy__(self, memo: object) -> NoReturn:
        """Refuse a copy: torch ties the shards to this model's hooks.

        Raises:
            ConfigError: Always.
        """
        msg = (
            "A model whose parameters are split over the ranks can't be copied. For a running mean of the parameters "
            "use `booster_runtime.ema(booster, model)`; or copy the model before `boost`, and boost the copy as well."
        )
        raise ConfigError(msg)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse to be pickled, as by ``torch.save``.

        Raises:
            CheckpointError: Always.
        """
        refuse_pickle()

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - torch's signature
        """Drop (or zero) all gradients, reduced or not.

        Collective: every rank of the world, to zero them after a backward; else none.
        """
        if not set_to_none:
            self.gradients.settle()
        self.gradients.reshard()
        self.gradients.forget()
        super().zero_grad(set_to_none)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state of the user's model as this rank holds it; see `Booster.save_model` for files."""
        self.gradients.reshard()
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load a state into the user's model as this rank holds it; see `Booster.load_model` for files.

        Raises:
            ConfigError: Inside of `whole_parameters`.
        """
        if self.gradients.calls.is_paused:
            msg = "`load_state_dict` needs the sharded parameters: call it outside of `model.whole_parameters()`."
            raise ConfigError(msg)
        return super().load_state_dict(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the sharded parameters under their names in the user's model, also after an evaluation."""
        self.gradients.reshard()
        return super().named_parameters(*args, **kwargs)

    def get_parameter(self, target: str) -> nn.Parameter:
        """Return a sharded parameter by its name, also between forward and backward."""
        self.gradients.reshard()
        return super().get_parameter(target)

    @contextlib.contextmanager
    def whole_parameters(self, *, writes: bool = False) -> Iterator[None]:
        """Have all parameters of the user's model whole on every rank for the block, as plain tensors.

        Gradients that come to them, of a penalty or a part of the model that runs in the block, are those of the model.

        Args:
            writes: Keep what the block writes into them; every rank takes rank 0's values.

        Raises:
            ConfigError: If a block without ``writes`` has written.

        Memory: the whole model on every rank.

        Collective: every rank of the world.
        """
        self.gradients.reshard()
        held: list[tuple[dict[str, Any], str, Any]] = self._held
        sharded = {id(parameter): parameter for _, _, parameter in held}
        with NamedCall("whole_parameters"), torch.no_grad():
            whole = {key: nn.Parameter(whole_of(each), each.requires_grad) for key, each in sharded.items()}
        for key, each in whole.items():
            add = functools.partial(self.gradients.add_of_whole, sharded[key], self.gradients.version)
            each.requires_grad_().register_post_accumulate_grad_hook(add)  # type: ignore[no-untyped-call]
            each.requires_grad_(sharded[key].requires_grad)
        before = {key: (each._version, each.data_ptr()) for key, each in whole.items()}  # noqa: SLF001 - tells of writes
        for parameters, name, parameter in held:
            parameters[name] = whole[id(parameter)]
        self.gradients.calls.is_paused = True
        try:
            yield
        finally:
            self.gradients.calls.is_paused = False
            for parameters, name, parameter in held:
                parameters[name] = parameter
                parameter.requires_grad_(whole[id(parameter)].requires_grad)
        if any(each._backward_hooks or len(each._post_accumulate_grad_hooks) > 1 for each in whole.values()):  # noqa: SLF001
            refuse_hook()
        if writes:
            with NamedCall("whole_parameters"), torch.no_grad():
                for key, parameter in sharded.items():
                    sent = whole[key].detach().to(parameter.device_mesh.device_type).contiguous()
                    send_first([sent])
                    local_of(parameter).copy_(local_of(sharded_like(sent, parameter)))
            self.gradients.note_update()
        elif before != {key: (each._version, each.data_ptr()) for key, each in whole.items()}:  # noqa: SLF001
            msg = "A block of `model.whole_parameters()` has written to parameters. Pass `writes=True` to keep that."
            raise ConfigError(msg)

    def _fqn_modifiers(self) -> dict[str, str]:
        """Tell ``torch.distributed.checkpoint.state_dict`` that names leave out the attribute ``module``."""
        return {"": "module"}

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        if name in self.__dict__.get("_forward_methods", ()):
            return functools.partial(self._run, value)
        return value

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # graphs can't break inside of a `try`
            return super()._forward(*args, **kwargs)
        with self._outermost():
            return self._watched(super()._forward(*args, **kwargs))

    @through_guard
    def _run(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        precision = self.precision
        enabled = precision is not None and precision.uses_autocast
        dtype = precision.compute_dtype if precision is not None and enabled else None
        autocast = torch.autocast(self._device_type, dtype=dtype, enabled=enabled)
        with NamedCall("forward"), autocast, self._outermost():
            return self._watched(method(*args, **kwargs))

    @contextlib.contextmanager
    def _outermost(self) -> Iterator[None]:
        """Begin with what the shards hold, and end with modules that hold shards, around a call of the model.

        What is gathered stays so for backward, but not after a call without gradients. A call within backward is a
        checkpoint's of the whole model, which runs again: backward gathers and frees by itself.

        Raises:
            ConfigError: If other tensors are in the place of parameters, with which torch would not compute.
        """
        is_again = graph_task() != -1
        if not self.gradients.depth and not is_again:
            self.gradients.calls.check_runs("")
            self.gradients.reshard()
            if self._has_others():
                msg = (
                    "Other tensors are in the place of parameters, as inside of `torch.func.functional_call`. FSDP "
                    "would compute with the parameters' own values: it gathers them itself. Write values to the "
                    "parameters, in `with model.whole_parameters(writes=True):`, or use plugin='ddp' or 'zero', whose "
                    "models take other tensors."
                )
                raise ConfigError(msg)
            if torch.is_inference_mode_enabled():
                self.gradients.gather_once()
        self.gradients.depth += 1
        is_done = False
        try:
            yield
            is_done = True
        finally:
            self.gradients.depth -= 1
            if not self.gradients.depth and not is_again:
                if is_done and torch.is_grad_enabled():
                    self.gradients.note_kept()
                else:
                    self.gradients.reshard()

    def _has_others(self) -> bool:
        """Return whether other tensors are in the place of parameters."""
        try:
            for parameters, name, parameter in self._held:
                if parameters[name] is not parameter:  # `get` and a generator would be calls for each
                    return True
        except KeyError:
            return True
        return False

    def _watched(self, output: Any) -> Any:
        """Return the model's output, whose backward raises if parameters have changed by then.

        torch gathers parameters again for backward, which autograd's check of saved tensors does not see.
        """
        if self.gradients.depth == 1 and torch.is_grad_enabled():
            check = functools.partial(self.gradients.check_age, self.gradients.version)
            for _, tensor in tensors_of(output):
                if tensor.requires_grad and not tensor.is_leaf:
                    tensor.register_hook(check)  # type: ignore[no-untyped-call]
        return output
