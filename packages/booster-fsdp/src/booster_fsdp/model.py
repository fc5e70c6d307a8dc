"""`FSDPModel`: wraps the sharded model, and `Forwards`, which watches its units while they run.

Outside of a call, modules hold sharded parameters, whose values count; while they run, they hold gathered copies.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.utils import _apply_to_tensors
from torch.nn.utils.parametrize import is_parametrized

from booster_core.errors import ConfigError, GradientError
from booster_core.plugin import ModelWrapper, through_guard
from booster_core.ranks import NamedCall
from booster_fsdp._torch_private import (
    gathered_parameters,
    groups_of,
    held_parameters,
    show_gathered,
    show_rows,
    transforms_are_active,
)
from booster_runtime.data import hidden_tensors
from booster_runtime.local_state import refuse_pickle
from booster_runtime.sharding import parametrized_in_forward

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import Tensor

    from booster_core.precision import PrecisionPolicy
    from booster_fsdp.gradients import ShardedGradients

_MIXED = "got mixed torch.Tensor and DTensor"
"""What torch says where a sharded parameter meets a plain tensor."""


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
        self.__dict__["_forwards"] = Forwards(gradients)
        # `torch.distributed.checkpoint` asks for it next to `named_buffers`, which lists the user's.
        self.__dict__["_non_persistent_buffers_set"] = module._non_persistent_buffers_set  # noqa: SLF001
        self.__dict__["_forward_methods"] = frozenset(forward_methods)

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
        """Drop (or zero) all gradients, reduced or not."""
        self.gradients.reshard()
        self.gradients.forget()
        super().zero_grad(set_to_none)
        for optimizer in self.boosted_optimizers:
            optimizer.zero_grad(set_to_none)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state of the user's model as this rank holds it; see `Booster.save_model` for files."""
        self.gradients.reshard()
        return super().state_dict(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the sharded parameters under their names in the user's model, also after an evaluation."""
        self.gradients.reshard()
        return super().named_parameters(*args, **kwargs)

    def _fqn_modifiers(self) -> dict[str, str]:
        """Tell ``torch.distributed.checkpoint.state_dict`` that names leave out the attribute ``module``."""
        return {"": "module"}

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        if name in self.__dict__.get("_forward_methods", ()):
            return functools.partial(self._run, value)
        return value

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        forwards: Forwards = self.__dict__["_forwards"]
        if torch.compiler.is_compiling():  # graphs can't break inside of a `try`
            return super()._forward(*args, **kwargs)
        with forwards.outermost():
            return super()._forward(*args, **kwargs)

    @through_guard
    def _run(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        precision = self.precision
        enabled = precision is not None and precision.uses_autocast
        dtype = precision.compute_dtype if precision is not None and enabled else None
        autocast = torch.autocast(self._device_type, dtype=dtype, enabled=enabled)
        forwards: Forwards = self.__dict__["_forwards"]
        with NamedCall("forward"), autocast, forwards.outermost():
            return method(*args, **kwargs)


class Forwards:
    """Watches the forwards of a model's units, and what its modules hold between them.

    torch gathers a unit for backward by hooks on the tensors of its output. Where it finds none, no gradient would be
    reduced, so this finds those inside of other objects. Autograd's check for in-place changes of saved tensors does
    not cover parameters that are gathered again for backward: a graph from before a step would use the parameters from
    after it, so these hooks also refuse backward through a graph that is older than the parameters.

    Args:
        gradients: Of the model; knows its units.
    """

    def __init__(self, gradients: ShardedGradients) -> None:
        self._gradients = gradients
        self._writes = ForwardWrites(cast("Sequence[nn.Module]", gradients.modules))
        self._groups: list[Any] = []
        self._kept: list[Any] = []  # groups that stay gathered after backward
        self._depth = 0
        for module in gradients.modules:
            state: Any = module._get_fsdp_state()  # noqa: SLF001 - as in `_torch_private`; also below
            groups = list(groups_of(module))
            self._groups += groups
            register, gather = state._register_pre_backward_hook, state._pre_backward  # noqa: SLF001
            state._register_pre_backward_hook = functools.partial(self._after, state, groups, register, gather)  # noqa: SLF001
            for group in groups:
                group.pre_forward = functools.partial(self._pre_forward, group, group.pre_forward)
                group.post_forward = functools.partial(self._post_forward, group, group.post_forward)
                group.pre_backward = functools.partial(self._pre_backward, group, group.pre_backward)
        root = cast("nn.Module", gradients.modules[0])
        path_of = {module: f"{path}." if path else "" for path, module in root.named_modules()}
        self._held = {
            path_of[module] + name: (module._parameters, name, inner)  # noqa: SLF001 - the dictionary that holds it
            for group in self._groups
            for module, name, inner in held_parameters(group)
        }

    @contextlib.contextmanager
    def outermost(self) -> Iterator[None]:
        """Begin with what the shards hold, and end with modules that hold shards, around a call of the model.

        What is gathered stays so for backward, but not after a call without gradients.

        Raises:
            ConfigError: If forward has used a parameter that was not gathered, or other tensors are in the place of
                parameters.
        """
        if not self._depth:
            self._gradients.reshard()
            self._let_go()
            self._check_held()
        self._depth += 1
        try:
            yield
        except RuntimeError as error:
            if _MIXED not in str(error):
                raise
            msg = (
                "The model uses a parameter of a unit outside of the unit's forward, where it is sharded, as losses do "
                f"that take the head's weight ({error}). Choose the units yourself, without that module: "
                "`TorchFSDPPlugin(unit_classes=[...])` with the classes of the layers. What belongs to no unit is "
                "gathered for the whole forward."
            )
            raise ConfigError(msg) from error
        finally:
            self._depth -= 1
            if not self._depth:
                if not torch.is_grad_enabled():
                    self._gradients.reshard()
                for group in self._groups:
                    if not group.is_sharded:
                        show_rows(group)

    def _check_held(self) -> None:
        """Raise where a module holds another tensor in place of a parameter, which torch would not compute with."""
        for path, (held, name, inner) in self._held.items():
            if held.get(name) is not inner.sharded_param:
                msg = (
                    f"Another tensor is in the place of parameter '{path}', as inside of `torch.func.functional_call`. "
                    "FSDP would compute with the parameter's own values: it gathers them itself. Write values to the "
                    "parameter, as by `parameter.copy_(values)`, or use plugin='ddp' or 'zero', whose models take "
                    "other tensors."
                )
                raise ConfigError(msg)

    def _let_go(self) -> None:
        for group in self._kept:
            group.reshard_after_backward = True
        self._kept.clear()

    def _pre_forward(self, group: Any, run: Any, *args: Any) -> Any:
        was_gathered = group.is_unsharded
        given = run(*args)
        if was_gathered:
            show_gathered(group)
        self._writes.take(group)
        return given

    def _post_forward(self, group: Any, run: Any, *args: Any) -> Any:
        self._writes.check(group)
        return run(*args)

    def _after(self, state: Any, groups: Sequence[Any], register: Any, gather: Any, output: Any) -> Any:
        """Let torch register its hooks on a unit's output, behind a check for parameters that are newer."""
        if torch.is_grad_enabled():
            trained = [inner for group in groups for inner in group.fsdp_params if inner.sharded_param.requires_grad]
            state._pre_backward = functools.partial(  # noqa: SLF001
                self._check_age, groups, self._version_of(groups), trained, gather
            )
        hidden = hidden_tensors(output)
        if hidden:
            register(hidden)
        return register(output)

    def _check_age(
        self, groups: Sequence[Any], made_at: object, trained: Sequence[Any], gather: Any, gradient: Tensor
    ) -> Tensor:
        if self._version_of(groups) != made_at:
            msg = (
                "The parameters were modified by an inplace operation, such as `optimizer.step()` or loading a "
                "checkpoint, after the forward that this backward goes through, so its gradients would be wrong. Run "
                "backward before the step, or forward again after it."
            )
            raise GradientError(msg)
        frozen = next((inner for inner in trained if not inner.sharded_param.requires_grad), None)
        if frozen is not None:
            msg = (
                f"Parameter '{frozen._param_fqn}' was frozen after the forward that this backward goes through, which "  # noqa: SLF001
                "would give it a gradient all the same. Freeze it before forward, or after backward."
            )
            raise GradientError(msg)
        return cast("Tensor", gather(gradient))

    def _pre_backward(self, group: Any, run: Any, *args: Any) -> None:
        """Gather a unit for backward; what recomputes its forward finds the gathered parameters in the modules.

        A backward that records a graph, as of a gradient penalty, leaves the unit gathered for that graph's backward.
        """
        is_recorded = torch.is_grad_enabled()
        if is_recorded and group.reshard_after_backward:
            self._kept.append(group)
            group.reshard_after_backward = False
        was_gathered = group.is_unsharded
        run(*args)
        if was_gathered:
            show_gathered(group)

    def _version_of(self, groups: Sequence[Any]) -> tuple[int, int]:
        """Return what changes with a unit's shards: our optimizer updates views of their rows."""
        writes = sum(inner.sharded_param.num_writes for group in groups for inner in group.fsdp_params)
        return self._gradients.num_updates, writes


class ForwardWrites:
    """Finds parameters that forward writes to while they are gathered: FSDP drops such values with the gathered copies.

    Version counters tell of operations in place at no cost. What goes through ``.data`` leaves no trace there, so the
    first forward of each unit in training and in evaluation, and then each whose number is a power of two, compares
    sums over the bits of its parameters as well.

    Args:
        modules: The modules of the units.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._excepted = {id(module) for unit in modules for module in parametrized_in_forward(unit)}
        self._num_forwards: dict[tuple[int, bool], int] = {}
        self._sums: dict[int, Tensor] = {}  # of gathered parameters, by the ids of torch's objects for them
        self._compared: deque[_Compared] = deque()

    def take(self, group: Any) -> None:
        """Remember a unit's gathered parameters before its forward.

        Raises:
            ConfigError: If an earlier forward has written to a parameter, which the device has found out since.
        """
        self._raise_late(waits=False)
        key = id(group), torch.is_grad_enabled()
        number = self._num_forwards[key] = self._num_forwards.get(key, 0) + 1
        if number & (number - 1) == 0 and not torch.compiler.is_compiling():
            for inner, gathered in self._watched(group):
                self._sums[id(inner)] = _sums(gathered)

    def check(self, group: Any) -> None:
        """Compare a unit's gathered parameters after its forward.

        Raises:
            ConfigError: If forward has written to one of them.
        """
        compared: list[tuple[Any, Tensor, Tensor]] = []
        for inner, gathered in self._watched(group):
            before = self._sums.pop(id(inner), None) if self._sums else None
            # torch's gathers leave the version counters at zero.
            if gathered._version:  # noqa: SLF001 - as autograd notices it
                raise _written(inner, "in place")
            if before is not None:
                compared.append((inner, before, _sums(gathered)))
        if compared:
            inners, before_all, after_all = zip(*compared, strict=True)
            differ = (torch.stack(before_all) != torch.stack(after_all)).any(dim=1)
            self._compared.append(_Compared(inners, differ))
            # The host waits for the device in the first forwards only. Later it looks when a forward begins.
            self._raise_late(waits=self._num_forwards[id(group), torch.is_grad_enabled()] <= _WAITED_FOR)

    def _raise_late(self, *, waits: bool) -> None:
        while self._compared and (waits or self._compared[0].is_there()):
            compared = self._compared.popleft()
            if waits:
                compared.wait()
            for inner, differs in zip(compared.inners, compared.told.tolist(), strict=True):
                if differs:
                    raise _written(inner, "through `.data`")

    def _watched(self, group: Any) -> Iterator[tuple[Any, Tensor]]:
        for inner, gathered in gathered_parameters(group):
            if not gathered.is_inference() and id(inner._module_info.module) not in self._excepted:  # noqa: SLF001
                yield inner, gathered


class _Compared:
    """For each of some parameters whether forward has written to it, on its way to the host.

    Args:
        inners: torch's objects for the parameters.
        differ: Whether each was written to, on the device.

    Attributes:
        told: The same on the host.
    """

    def __init__(self, inners: Sequence[Any], differ: Tensor) -> None:
        self.inners = inners
        self.told = differ.to("cpu", non_blocking=True)
        self._arrived = None if differ.device.type == "cpu" else torch.Event(differ.device)
        if self._arrived is not None:
            self._arrived.record()

    def is_there(self) -> bool:
        """Whether the host can read it without waiting for the device."""
        return self._arrived is None or self._arrived.query()

    def wait(self) -> None:
        """Return when the host can read it."""
        if self._arrived is not None:
            self._arrived.synchronize()


_WAITED_FOR = 2


def _sums(gathered: Tensor) -> Tensor:
    """Return sums over the bits of a tensor, shape ``(4,)``, that depend on their order by row and by column."""
    with torch.no_grad():
        bits = gathered.detach().reshape(-1).view(torch.uint8)
        width = next(each for each in _WORDS if bits.numel() % each == 0 and bits.storage_offset() % each == 0)
        words = bits.view(_WORDS[width])
        columns = max(min(words.numel(), _COLUMNS), 1)
        rows = words.numel() // columns
        table, rest = words[: rows * columns].view(rows, columns), words[rows * columns :]
        places = torch.arange(1, 1 + max(rows, columns), device=bits.device)
        down, across = table.sum(0, dtype=torch.int64), table.sum(1, dtype=torch.int64)
        sums = [down, down * places[:columns], across * places[:rows], rest * places[: rest.numel()]]
        return torch.stack([each.sum() for each in sums])


_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
"""Integers by their size: sums of them, which wrap around, are the same in any order."""
_COLUMNS = 4096


def _written(inner: Any, how: str) -> ConfigError:
    return ConfigError(
        f"Parameter '{inner._param_fqn}' was changed {how} during forward. FSDP drops that change, because "  # noqa: SLF001
        "it keeps only shards. Change parameters after `optimizer.step()`, or keep the module whole by "
        "`ignored_modules`."
    )


def keep_outputs(module: nn.Module) -> None:
    """Let a module copy outputs that would be lost, or lose their hooks; call this before ``fully_shard``.

    An in-place operation on an output that is a view (``x += y``), such as that of a linear layer on a
    three-dimensional input, drops torch's hook, and with it the gradients of the unit. An output that is a parameter,
    or a view of one, would lose its values when the parameter is freed.
    """
    module.register_forward_hook(_with_own_memory)


def _with_own_memory(module: nn.Module, args: Any, output: Any) -> Any:
    del args
    return _apply_to_tensors(functools.partial(_own, module), output)


def _own(module: nn.Module, tensor: Tensor) -> Tensor:
    if transforms_are_active():  # whose tensors don't tell what memory they have
        return tensor.clone()
    if tensor.requires_grad and torch.is_grad_enabled():
        return tensor.clone() if tensor.is_leaf or tensor._is_view() else tensor  # noqa: SLF001 - the only way to ask
    if isinstance(tensor, DTensor) or tensor.layout != torch.strided:
        return tensor
    start = tensor.untyped_storage().data_ptr()
    gathered = (each for each in module.parameters() if not isinstance(each, DTensor))
    return tensor.clone() if start and any(each.untyped_storage().data_ptr() == start for each in gathered) else tensor


def refuse_apart(module: nn.Module, name: str) -> None:
    """Let a module that is no unit refuse to run while its parameters are sharded.

    Args:
        module: The module; it has sharded parameters of its own.
        name: Its name, for the message.
    """
    own = next(key for key, parameter in module._parameters.items() if isinstance(parameter, DTensor))  # noqa: SLF001

    def check(module: nn.Module, args: Any) -> None:
        del args
        # peft moves what it parametrizes to another place before this is called.
        held: Any = module._parameters.get(own)  # noqa: SLF001
        if held is None and is_parametrized(module, own):
            moved: Any = module.parametrizations
            held = moved[own].original
        if not torch.compiler.is_compiling() and isinstance(held, DTensor):
            msg = (
                f"`{name}` ({type(module).__name__}) ran outside of the forward of its unit, where its parameters are "
                "sharded. To call a part of the model by itself, write a method of the model that does, and name it in "
                "`TorchFSDPPlugin(forward_methods=[...])`: it runs with gathered parameters. Within the model's "
                "forward, choose the units yourself, without that part: `unit_classes=[...]`."
            )
            raise ConfigError(msg)

    module.register_forward_pre_hook(check)
