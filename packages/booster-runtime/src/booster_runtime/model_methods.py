"""Methods of the user's model that need all ranks, or of which one rank has a part: saving, pickling, generating.

``save_pretrained`` of Hugging Face's libraries writes what this process holds, which is a part of the model under
strategies that shard. On the model that `boost` returned it becomes `Booster.save_model`, or
`Booster.save_lora_as_pretrained` for adapters. On the user's own model it raises where that does not hold the values.

``torch.save`` of a state dict of such a model would write a file that lacks the other ranks' parts, and say so only to
who looks: shards of equal sizes even load, in the wrong places. It can be read and loaded again, and not saved.

``generate`` of ranks that need each other in every forward goes on for as many tokens as the longest text has.
"""

from __future__ import annotations

import copy
import functools
import sys
import weakref
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist

from booster_core.checkpoint_io import mebibytes
from booster_core.errors import CheckpointError, ConfigError
from booster_core.plugin import unwrap_model
from booster_core.ranks import NamedCall
from booster_core.state import ReplicatedStateAdapter, is_adapted, library_of, own_class, without_adapters

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torch import nn
    from typing_extensions import Self

    from booster_core import Booster
    from booster_core.plugin import ModelWrapper

__all__ = ["mark_as_local", "refuse_pickle"]


_UPLOAD = (
    "Save into a folder, call `booster.wait()`, and upload the folder by `huggingface_hub.upload_folder` on one rank"
)
_WITHOUT_EFFECT: dict[str, tuple[tuple[Any, ...], str]] = {
    "state_dict": ((None,), "The values are taken from the model, wherever they are: leave `state_dict` out"),
    "push_to_hub": ((False, None), _UPLOAD),
    "repo_id": ((None,), _UPLOAD),
    "token": ((None,), "Nothing is uploaded: leave `token` out"),
    "save_function": ((None, torch.save), "Booster writes the files itself: leave `save_function` out"),
    "save_peft_format": ((True,), "Adapters are written as peft reads them: leave `save_peft_format` out"),
    "save_original_format": ((True,), "Tensors have the names of the model's modules: leave it out"),
    "distributed_checkpoint": ((False,), "For that format call `booster.save_model(..., format='dcp')`"),
    "path_initial_model_for_weight_conversion": ((None,), "Convert adapters from a folder, by peft"),
}
"""Arguments of the libraries that have one meaning here: its values, and what to do instead of others."""


def take_over(boosted: ModelWrapper, booster: Booster) -> None:
    """Let ``save_pretrained`` of a boosted model, where it has one, save by a Booster.

    On the user's own model and its modules it raises where these do not hold the values.

    Args:
        boosted: The boosted model.
        booster: The Booster that boosted it.

    Collective: none; calling the method is, on every rank.
    """
    model = unwrap_model(boosted)
    holds_values = (
        type(booster.plugin.state_adapter(boosted, boosted.boost_context)) is ReplicatedStateAdapter
    )  # one for shards may extend it
    if is_adapted(model):
        save: Callable[..., None] | None = _save_adapters
    else:
        # Where each rank holds the values, other libraries' own methods are right.
        library = library_of(model)
        save = _save_model if library == "transformers" or (library is not None and not holds_values) else None
    if not holds_values:
        remedy = (
            "Call `save_pretrained` of the model that `boost` returned, on every rank, or "
            "`booster.save_model(model, folder)`"
        )
        for module in model.modules():
            if not callable(getattr(type(module), "save_pretrained", None)):
                continue
            call = "save_lora_as_pretrained" if is_adapted(module) else "save_model"
            of_part = f"Call `booster.{call}(part, folder)` with this module as `part`, on every rank"
            text = remedy if module in (model, without_adapters(model)) else of_part
            module.save_pretrained = _Refusal(module, booster.plugin.name, text)  # type: ignore[assignment]
    if not hasattr(model, "save_pretrained"):
        return
    if save is not None:
        # Made when it is asked for: a method that the model kept would keep the model alive.
        boosted.replace_method("save_pretrained", functools.partial(functools.partial, save, booster))
        boosted.replace_method("push_to_hub", lambda _: _refuse_upload)
    elif not holds_values:
        remedy = (
            "Call `booster.save_model(model, 'model.safetensors')` on every rank, and load that file's tensors by "
            "`load_state_dict`"
        )
        refusal = _Refusal(model, booster.plugin.name, remedy)
        boosted.replace_method("save_pretrained", lambda _: refusal)


class _Refusal:
    """A method ``save_pretrained`` that raises."""

    def __init__(self, model: nn.Module, plugin: str, remedy: str) -> None:
        self._text = (
            f"`{own_class(model).__name__}.save_pretrained` would write what this rank holds under plugin '{plugin}', "
            f"which is not the model. {remedy}."
        )

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs
        raise ConfigError(self._text)


def _refuse_upload(*_: Any, **__: Any) -> None:
    """Stand for ``push_to_hub``, which would upload what this rank holds, from each rank."""
    msg = f"`push_to_hub` of a boosted model uploads nothing. {_UPLOAD}."
    raise ConfigError(msg)


def _save_model(
    booster: Booster,
    model: ModelWrapper,
    save_directory: str | Path,
    *,
    is_main_process: bool = True,
    max_shard_size: int | str | None = None,
    variant: str | None = None,
    safe_serialization: bool = True,
    **others: Any,
) -> None:
    """Write the model as `Booster.save_model` does, so that its library's ``from_pretrained`` loads it.

    Args:
        booster: The Booster.
        model: The boosted model.
        save_directory: The folder.
        is_main_process: True on rank 0 at least; every rank takes part all the same.
        max_shard_size: Largest size of a file: bytes, or ``"2GB"``; 1 MiB or more.
        variant: Put into the file names.
        safe_serialization: Write safetensors.
        **others: Further arguments of the libraries, which raise unless they say what is done anyway.

    Raises:
        ConfigError: If an argument asks for what is not done.
        CheckpointError: If the model can't be written.
        MissingRanksError: If some ranks do not call this.

    Collective: every rank of the world.
    """

    def check() -> None:
        _check_others(others)
        if getattr(unwrap_model(model), "_hf_peft_config_loaded", False):
            msg = (
                "Adapters that were added by the model's `add_adapter` are not told apart here. Add them by "
                "`booster.enable_lora`, or write the whole model by `booster.save_model(model, folder, shard=True)`."
            )
            raise ConfigError(msg)
        if max_shard_size is not None:
            mebibytes(max_shard_size)

    _agree(booster, check, is_main_process=is_main_process)
    booster.save_model(
        model,
        save_directory,
        shard=library_of(unwrap_model(model)) != "huggingface_hub",  # whose models are one file
        prefix=variant,
        max_shard_size=max_shard_size,
        use_safetensors=safe_serialization,
    )


def _save_adapters(
    booster: Booster,
    model: ModelWrapper,
    save_directory: str | Path,
    safe_serialization: bool = True,  # noqa: FBT001, FBT002 - positional in peft
    selected_adapters: Sequence[str] | None = None,
    save_embedding_layers: bool | str = "auto",  # noqa: FBT001 - positional in peft
    *,
    is_main_process: bool = True,
    **others: Any,
) -> None:
    """Write the adapters as `Booster.save_lora_as_pretrained` does; see `_save_model`.

    Collective: every rank of the world.
    """
    _agree(booster, lambda: _check_others(others), is_main_process=is_main_process)
    booster.save_lora_as_pretrained(
        model,
        save_directory,
        safe_serialization,
        selected_adapters=selected_adapters,
        save_embedding_layers=save_embedding_layers,
    )


def _agree(booster: Booster, check: Callable[[], None], *, is_main_process: bool) -> None:
    """Raise on every rank if arguments are wrong on one, and name the ranks that do not come."""
    context = booster.context
    with context.coordinator.together("save_pretrained"):
        check()
        if not is_main_process and context.coordinator.rank == 0:
            msg = (
                "`is_main_process=False` on rank 0: nothing would be written. Leave it out; every rank calls "
                "`save_pretrained` and writes its part."
            )
            raise ConfigError(msg)


def _check_others(others: dict[str, Any]) -> None:
    for name, value in others.items():
        if name not in _WITHOUT_EFFECT:
            msg = f"`save_pretrained` of a boosted model got an unexpected keyword argument '{name}'."
            raise TypeError(msg)
        values, remedy = _WITHOUT_EFFECT[name]
        if not any(value is each or value == each for each in values):
            shown = "" if name == "state_dict" else f"={value!r}"
            msg = f"`{name}{shown}` of `save_pretrained` can't be followed for a boosted model. {remedy}."
            raise ConfigError(msg)


class LocalState(OrderedDict[str, Any]):
    """What one rank holds of a model's state; refuses to be pickled."""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse to be saved.

        Raises:
            CheckpointError: Always.
        """
        msg = (
            "This state dict holds one rank's shards of the model, so that a file of it is not one of the whole model. "
            "Call `booster.save_model(model, path)` on every rank, which plain PyTorch and transformers can load."
        )
        raise CheckpointError(msg)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)((name, copy.deepcopy(value, memo)) for name, value in self.items())


def refuse_pickle() -> NoReturn:
    """Refuse to pickle a boosted model of which this rank may hold a part, as ``torch.save`` of the model would.

    Raises:
        CheckpointError: Always.
    """
    msg = (
        "A boosted model of this strategy can't be pickled, as `torch.save(model, path)` does: this process may hold a "
        "part of the model only. Call `booster.save_model(model, path)` on every rank, which plain "
        "PyTorch and transformers can load, or `booster.save_checkpoint` to resume the run."
    )
    raise CheckpointError(msg)


def mark_as_local(model: nn.Module) -> None:
    """Let ``state_dict()`` of a model, of which this rank holds a part, be a `LocalState`."""
    # The public hook can't return another dict.
    model._register_state_dict_hook(_as_local)  # type: ignore[no-untyped-call] # noqa: SLF001


def _as_local(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> dict[str, Any]:
    del module, metadata
    if prefix:  # a part of a larger state
        return state
    local = LocalState(state)
    local._metadata = getattr(state, "_metadata", None)  # type: ignore[attr-defined] # noqa: SLF001 - as torch keeps it
    return local


def generating_model(model: nn.Module) -> Any:
    """Return the model that has transformers' ``generate``: the user's, or the one inside its adapters, or ``None``."""
    transformers = sys.modules.get("transformers")  # a model of it can't be there without it
    if transformers is None:
        return None
    kind = transformers.GenerationMixin
    return next((module for module in model.modules() if isinstance(module, kind)), None)


def generate_together(model: ModelWrapper) -> None:
    """Let ``generate`` of a boosted model of transformers go on until every rank's texts are complete.

    transformers does so by itself for DeepSpeed's ZeRO-3 and for FSDP: it is its option ``synced_gpus``. Ranks whose
    texts end first would leave the others waiting for their parts of the parameters. Scripts call ``generate`` of the
    user's own model, too.

    Args:
        model: The boosted model, whose ranks gather parameters from each other.
    """
    inner = generating_model(model.unwrap())
    if inner is not None:
        for each in {id(each): each for each in (model.unwrap(), inner)}.values():
            if callable(getattr(each, "generate", None)):
                each.generate = _Together(each)


class _Together:
    """The method ``generate`` of a model, on all ranks; copies of the model have their own again."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)  # which has this
        # What torch's FSDP has put in place of the class's gathers what no unit holds. A compiled model's has none.
        own: Any = model.generate
        self.__wrapped__ = own.__func__ if hasattr(own, "__func__") else type(model).generate  # type: ignore[attr-defined]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        kwargs.setdefault("synced_gpus", dist.get_world_size() > 1)
        with NamedCall("generate"):
            return self.__wrapped__(self._model(), *args, **kwargs)

    def __reduce__(self) -> Any:
        return functools.partial, (self.__wrapped__, self._model())
