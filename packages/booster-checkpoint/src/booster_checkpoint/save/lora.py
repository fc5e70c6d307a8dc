"""Write a model's adapters as peft writes and reads them, from the shards of all ranks.

For each adapter a folder with ``adapter_config.json`` and one file of tensors; that of the adapter ``default`` is the
folder itself, the others' are below it by name.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from booster_checkpoint.files.names import SAFETENSORS, TORCH, FileNames
from booster_checkpoint.save.parts import ModelPart
from booster_checkpoint.save.targets import target_at
from booster_checkpoint.storage import leaves_folder
from booster_core.errors import ConfigError
from booster_core.state import ModelView, NamedTensors, call_with_tensors, is_adapted, own_class

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from peft import PeftModel
    from torch import nn

    from booster_checkpoint.save.save import Saver
    from booster_checkpoint.session import Session
    from booster_checkpoint.storage import Location
    from booster_core.checkpoint_io import ModelState, SaveRequest
    from booster_core.state import StateAdapter, TensorShard

_FILE = "adapter_model"
_CONFIG = "adapter_config.json"


def adapted_model(model: nn.Module | None) -> PeftModel:
    """Return the user's own model as peft's.

    Raises:
        ConfigError: If it is none of peft's.
    """
    if model is not None and is_adapted(model):
        return cast("PeftModel", model)
    msg = f"The model (`{type(model).__name__}`) has no adapters to save. Call `enable_lora` before `boost`."
    raise ConfigError(msg)


def save_adapters(
    saver: Saver,
    model: PeftModel,
    state: ModelState,
    folder: Location,
    request: SaveRequest,
    *,
    selected: Sequence[str] | None,
) -> None:
    """Write a model's adapters; see `Booster.save_lora_as_pretrained`.

    Args:
        saver: Writes the files.
        model: The user's own model, with adapters.
        state: Its state.
        folder: Where the adapter ``default`` goes.
        request: The call.
        selected: Names of adapters; ``None`` for all.

    Raises:
        ConfigError: If there is no adapter of a selected name.

    Collective: every rank.
    """
    present = list(model.peft_config)
    wanted = present if selected is None else list(selected)
    unknown = [name for name in wanted if name not in present]
    if unknown:
        msg = f"The model has no adapters {unknown}. It has: {', '.join(map(repr, present))}."
        raise ConfigError(msg)
    suffix, other = (SAFETENSORS, TORCH) if request.use_safetensors else (TORCH, SAFETENSORS)
    for name in wanted:
        if leaves_folder(name):
            msg = f"The adapter's name '{name}' leads out of '{folder}', where its files go. Rename the adapter."
            raise ConfigError(msg)
        home = folder if name == "default" else folder / name
        embeddings = _saves_embeddings(saver.session, model, name, home, request)
        names, files, dtype = (
            FileNames(base=_FILE, suffix=suffix),
            _file_names(model, name, embeddings=embeddings),
            state.dtype,
        )
        part = ModelPart(
            _AdapterView(state.adapter, files, dtype if isinstance(dtype, Mapping) else {}),
            names,
            file_name=names.single,
            dtype=_in_files(dtype, files) if isinstance(dtype, Mapping) else dtype,
            texts={_CONFIG: _config_text(model, name)},
        )

        def drop_other_form(_written: object, stale: Location = home / f"{_FILE}{other}") -> None:
            if stale.size() is not None:
                stale.remove()  # peft reads safetensors, where both are there

        saver.save([part], target_at(home), request.call, commit=drop_other_form)


class _AdapterView(ModelView):
    """Shows the tensors of one adapter under their names in peft's files."""

    def __init__(
        self, inner: StateAdapter, names: Mapping[str, Sequence[str]], dtypes: Mapping[str, torch.dtype]
    ) -> None:
        super().__init__(inner)
        self._names, self._dtypes = names, dtypes

    def model_shards(self) -> Iterator[TensorShard]:
        for shard in self.inner.export_shards(self._dtypes):
            for name in self._names.get(shard.name, ()):
                yield replace(shard, name=name)


def _in_files(dtypes: Mapping[str, torch.dtype], files: Mapping[str, Sequence[str]]) -> dict[str, torch.dtype]:
    return {file: dtypes[name] for name, in_files in files.items() if name in dtypes for file in in_files}


class _Asked(torch.nn.Module):
    """Asks peft for what it would save of a model, in a call in which the model's tensors may be others.

    Args:
        model: The model.
    """

    def __init__(self, model: PeftModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, tensors: dict[str, torch.Tensor], adapter: str, *, embeddings: bool | str) -> dict[str, Any]:
        """Return the tensors of an adapter by the names that they have in its file."""
        from peft import get_peft_model_state_dict

        found: dict[str, Any] = get_peft_model_state_dict(
            self.model,
            state_dict=tensors,
            adapter_name=adapter,
            save_embedding_layers=embeddings,  # type: ignore[arg-type]
        )
        return found


def _saves_embeddings(session: Session, model: PeftModel, adapter: str, path: Location, request: SaveRequest) -> bool:
    """Whether an adapter's file gets the embeddings; rank 0 lets peft look where that is asked for.

    It compares the vocabulary with that of the files that the base came from, which other hosts may not have.

    Collective: every rank.
    """
    asked: bool | str = request.save_embedding_layers
    with session.together(request.call, path):
        if asked == "auto" and session.rank == 0:
            sizes = [sum(map(len, _file_names(model, adapter, embeddings=way).values())) for way in (False, "auto")]
            asked = sizes[0] != sizes[1]
    return bool(session.coordinator.broadcast_object(asked))


def _file_names(model: PeftModel, adapter: str, *, embeddings: bool | str) -> dict[str, list[str]]:
    """Return for the first name of each of an adapter's tensors the names that it has in peft's file."""
    config = model.peft_config[adapter]
    if config.is_prompt_learning:
        raise _computed(config)
    named = NamedTensors.of(model)
    # peft is given tensors without memory, and tells by them which it would write under which name. It also asks some
    # modules themselves, whose values may not be here.
    marks = {path: torch.empty(0, device="meta") for path in named.paths.values()}
    held = {key: marks[named.paths[name]] for key, name in named.name_of.items()}
    marked: dict[str, Any] = call_with_tensors(_Asked(model), held, (marks, adapter), {"embeddings": embeddings})
    name_of = {id(marks[path]): named.aliases.get(name, name) for name, path in named.paths.items()}
    names: dict[str, list[str]] = {}
    first_key: dict[str, str] = {}
    for key, mark in marked.items():
        plain = key.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")
        if first_key.setdefault(plain, key) != key:
            msg = f"Two tensors of adapter '{adapter}' would be saved as '{plain}': {first_key[plain]!r} and {key!r}."
            raise ConfigError(msg)
        if id(mark) not in name_of:
            raise _computed(config)
        names.setdefault(name_of[id(mark)], []).append(plain)
    return names


def _computed(config: Any) -> ConfigError:
    return ConfigError(
        f"Adapters of type {config.peft_type.value} save what peft computes of their parameters, some not here. "
        "Save the model by `booster.save_model`, load it in one process by `Booster().load_model(model, folder)`, and "
        "let peft write them there: `model.save_pretrained(folder)`."
    )


def _config_text(model: PeftModel, adapter: str) -> str:
    """Return what peft writes as an adapter's ``adapter_config.json``."""
    config = copy.copy(model.peft_config[adapter])
    base = model.get_base_model()
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = getattr(base, "name_or_path", None) or None
    config.inference_mode = True
    auto_mapping = None
    if config.task_type is None:
        auto_mapping = {"base_model_class": own_class(base).__name__, "parent_library": own_class(base).__module__}
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder, auto_mapping_dict=auto_mapping)
        return (Path(folder) / _CONFIG).read_text()
