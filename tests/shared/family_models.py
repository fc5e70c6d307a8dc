"""A tiny model of every family of transformers with a causal language model: its configuration, shrunk by field names.

`settings_of` looks at the default configuration of a family and returns small values for the fields that are sizes.
Composed configurations are shrunk part by part. Where names don't tell enough, `EXCEPTIONS` has the family's settings.
"""

import warnings

import torch

SAMPLES, LENGTH = 4, 16
_VOCABULARY = 64
_LARGEST = 3_000_000
"""Parameters of a model that still counts as tiny."""


def _each(value, names):
    return dict.fromkeys(names.split(), value)


SIZES = {
    **_each(
        32,
        "hidden_size d_model n_embd emb_dim embedding_size word_embed_proj_dim input_embedding_size d_embed "
        "output_embedding_size out_hidden_size attention_hidden_size lru_width backbone_hidden_size projection_dim "
        "text_hidden_size output_proj_dims adapter_out_dim input_size mm_embed_dim audio_embed_dim vision_output_dim "
        "projector_input_dim projector_output_dim projector_hidden_size projection_hidden_dim mamba_d_ssm "
        "hidden_size_global conf_hidden_size attention_dim",
    ),
    **_each(
        64,
        "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim n_inner dff d_inner dim_ff feed_forward_size "
        "ffn_hidden_size intermediate_size_mlp dense_intermediate_size vocab_size vocab_size_per_layer_input "
        "max_position_embeddings n_positions n_ctx max_seq_len seq_length context_length max_target_positions "
        "unpadded_vocab_size shared_intermediate_size mlp_dim audio_vocab_size encoder_hash_byte_group_vocab "
        "max_source_positions original_max_position_embeddings decoder_vocab_size image_vocab_size",
    ),
    **_each(
        16,
        "moe_intermediate_size shared_expert_intermediate_size shared_experts_intermediate_size "
        "kv_lora_rank moe_shared_expert_intermediate_size expert_ffn_hidden_size o_lora_rank laurel_rank "
        "hidden_size_per_layer_input router_hidden_size adapter_rank codebook_size hc_lowrank gated_norm_rank "
        "mamba_d_state ssm_state_size state_size image_size conf_attention_context_left",
    ),
    **_each(24, "q_lora_rank"),  # another number than that of keys
    **_each(
        8,
        "head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim dim_head kv_channels attention_head_size "
        "linear_key_head_dim linear_value_head_dim linear_head_dim swa_head_dim global_head_dim mamba_head_dim "
        "index_head_dim d_kv sliding_window swa_sliding_window sliding_window_size chunk_size mamba_chunk_size "
        "attention_chunk_size block_size window_size attention_window_size local_attention rel_extent "
        "query_pre_attn_scalar num_experts num_local_experts n_routed_experts moe_num_experts audio_channels "
        "index_topk floor_scale n_mels num_mel_bins rank_ratio d_rel time_step_rank swa_v_head_dim "
        "cross_head_dim hidden_size_per_head swa_qk_rope_head_dim csa_head_dim",
    ),
    **_each(
        4,
        "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads mamba_n_heads "
        "attention_heads num_encoder_attention_heads num_decoder_attention_heads linear_num_value_heads n_mamba_heads "
        "mamba_num_heads linear_num_heads swa_num_attention_heads conf_num_attention_heads index_n_heads patch_size "
        "rotary_dim num_buckets prompt_length num_codebooks zero_expert_num position_bias_num_buckets",
    ),
    **_each(
        2,
        "num_key_value_heads linear_num_key_heads swa_num_key_value_heads kv_n_heads num_global_key_value_heads "
        "n_layer n_layers num_layers decoder_layers encoder_layers num_encoder_layers num_decoder_layers depth "
        "num_hidden_layers num_experts_per_tok moe_topk moe_k moe_top_k top_k_experts n_groups n_group "
        "index_topk_blocks type_vocab_size o_groups mamba_n_groups conf_num_hidden_layers mamba_ngroups num_blocks "
        "global_attn_every_n_layers layer_group_size sliding_window_pattern no_rope_layer_interval experts_per_token "
        "attn_layer_period max_window_layers num_experts_per_token prompt_types segment_types heads_per_ngram",
    ),
    **_each(
        1,
        "n_shared_experts num_shared_experts moe_num_shared_experts topk_group first_k_dense_replace num_dense_layers "
        "moe_layer_start_index attn_layer_offset mem_blocks num_mem_blocks",
    ),
    **_each(0.1, "initializer_range init_std initializer_std"),
    **_each(0, "pad_token_id"),
    **_each(1, "bos_token_id cls_token_id"),
    **_each(2, "eos_token_id sep_token_id decoder_start_token_id forced_eos_token_id"),
}
"""What stands for a number in a field of this name."""
_OFTEN_NONE = ("head_dim", "num_key_value_heads")
"""Fields that most families compute if they are ``None``, and others need."""
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers")

_ROPE = {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}
_SLIDING_THEN_FULL = ["sliding_attention", "full_attention"]
_INDEXED = {
    "layer_types": ["linear_attention", "indexed_attention"],
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
}
_SHARED_TWICE = {
    "num_hidden_layers": 4,
    "layers_block_type": ["linear_attention", "hybrid"] * 2,
    "attention_hidden_size": 64,
    "attention_head_dim": 16,
    "num_key_value_heads": 4,
}
EXCEPTIONS = {
    "bailing_hybrid": {"num_local_experts": 8, "num_experts_per_tok": 2, "n_group": 2},  # has two names for each
    "cohere_compass_text": {"layer_types": ["full_attention"] * 2, "rope_parameters": _ROPE},
    "cpmant": {"position_bias_num_buckets": 32, "prompt_types": 32, "segment_types": 32},  # are computed as such
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 64, "moe_num_experts": 8, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},  # is None by default
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},  # likewise
    "dots3_note": {  # its sliding layers have sizes of their own
        "vision_config": {"adapter_in_dim": 32},
        "audio_config": {"adapter_input_size": 32},
        "text_config": {"layer_types": ["indexed_attention"] * 2},
    },
    "dots3_note_text": {"layer_types": ["indexed_attention"] * 2},
    "gemma3n_text": {  # the last layers share keys with earlier ones of their type
        "num_hidden_layers": 4,
        "layer_types": _SLIDING_THEN_FULL * 2,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.0] * 4,
        "intermediate_size": [64] * 4,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},  # has no default
    "mamba2": {"num_heads": 8, "head_dim": 8},  # together twice the hidden size
    "qwen4_exp": {"text_config": _INDEXED},
    "qwen4_exp_text": _INDEXED,
    "reformer": {
        "attn_layers": ["local", "lsh"],
        "axial_pos_shape": [4, 4],
        "axial_pos_embds_dim": [16, 16],
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
    },
    "roc_bert": {  # embeds shapes and sounds of words as well
        "shape_embed_dim": 16,
        "shape_vocab_size": 64,
        "pronunciation_embed_dim": 16,
        "pronunciation_vocab_size": 64,
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": _SHARED_TWICE,  # several layers share one block
    "zamba2": {**_SHARED_TWICE, "mamba_ngroups": 1, "num_mem_blocks": 1},
    "zaya": {"num_experts_per_tok": 1},  # nothing else is supported
}
"""Settings of families that can't be shrunk by names alone, such as where fields depend on each other."""
NOT_MEASURED = {
    "gemma3n": "its vision tower is one of timm",
    "gemma4_assistant": "it drafts for another model, whose states it needs",
    "gemma4_unified_assistant": "it drafts for another model, whose states it needs",
    "musicgen": "transformers does not build it by `AutoModelForCausalLM`",
    "musicgen_melody": "transformers does not build it by `AutoModelForCausalLM`",
    "git": "its loss skips the positions of an image",
}
"""Families whose model can't be made tiny, or not trained on tokens alone, with the reason."""


def families():
    """Return transformers' families with a causal language model: the class of each by its model type."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def build(name):
    """Return a tiny model of a family with random weights, the same under the same seed.

    Args:
        name: The model type.
    """
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the model's own configuration
        model = AutoModelForCausalLM.from_config(tiny_config(name))
    fill(model)
    return model.train()


def check_tiny(name):
    """Raise if a family's model is not tiny, without building it.

    Args:
        name: The model type.

    Raises:
        ValueError: If it has too many parameters.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        number = sum(each.numel() for each in AutoModelForCausalLM.from_config(tiny_config(name)).parameters())
    if number > _LARGEST:
        msg = f"{number / 1e6:.0f}M parameters"
        raise ValueError(msg)


def tiny_config(name, more=None):
    """Return a family's configuration with small sizes.

    Args:
        name: The model type.
        more: Settings beyond those that are told by the fields' names.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[name]
    settings = _merged(_merged(settings_of(kind()), EXCEPTIONS.get(name, {})), more or {})
    config = kind(**settings)
    for each in _parts(config):
        _prepare(each)
    return config


def settings_of(config):
    """Return the settings that make a configuration small.

    Args:
        config: With the defaults of its class.
    """
    from transformers import PreTrainedConfig

    fields = vars(config)
    layers = next((fields[each] for each in _LAYERS if isinstance(fields.get(each), int)), None)
    lists = {
        each: value
        for each, value in fields.items()
        if isinstance(value, (list, tuple)) and len(value) == layers and isinstance(value[0], (str, int, float))
    }
    kinds = {each: list(dict.fromkeys(value)) for each, value in lists.items()}
    indices = {each for each, value in kinds.items() if len(value) == layers and value == sorted(value)}
    number = max([2, *(len(value) for each, value in kinds.items() if each not in indices)])
    settings = {}
    for each, value in fields.items():
        if isinstance(value, PreTrainedConfig):
            settings[each] = {**settings_of(value), "model_type": value.model_type}
        elif each in indices:
            settings[each] = list(range(number))
        elif each in kinds:
            small = [SIZES[each]] if each in SIZES else kinds[each]
            settings[each] = [small[index % len(small)] for index in range(number)]
        elif each in _LAYERS and isinstance(value, int):
            settings[each] = number
        elif each in (_OFTEN_NONE if value is None else SIZES) and (value is None or _is_number(value)):
            settings[each] = SIZES[each]
    if "kv_lora_rank" in fields:
        settings["num_key_value_heads"] = SIZES["num_attention_heads"]  # latent attention has as many
    return settings


def _is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def batch_of(name):
    """Return a whole batch for a family's model.

    Args:
        name: The model type.
    """
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(3, _VOCABULARY, (SAMPLES, LENGTH), generator=generator)
    return {"input_ids": tokens, "labels": tokens.clone()}


def has_experts(model):
    """Return whether a model has a mixture of experts, going by the names of its modules."""
    return any("expert" in name.rpartition(".")[2].lower() for name, _ in model.named_modules())


def _merged(settings, others):
    found = dict(settings)
    for name, value in others.items():
        inner = found.get(name)
        found[name] = _merged(inner, value) if isinstance(value, dict) and isinstance(inner, dict) else value
    return found


def _parts(config):
    """Return a configuration and those in it."""
    from transformers import PreTrainedConfig

    yield config
    for value in list(vars(config).values()):
        if isinstance(value, PreTrainedConfig):
            yield from _parts(value)


def _prepare(config):
    """Make a decoder of what may be one, without dropout, noise and cache."""
    for name, value in list(vars(config).items()):
        if ("drop" in name or "jitter" in name) and isinstance(value, float):
            setattr(config, name, 0.0)
        elif name == "is_decoder":
            config.is_decoder = True
        elif name == "use_cache":
            config.use_cache = False


def fill(model):
    """Give values to what begins with zeros or ones: they would hide how often it is added or multiplied."""
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("e_score_correction_bias"):
                tensor.copy_(torch.randn_like(tensor) * 0.1)
            elif isinstance(tensor, torch.nn.Parameter) and tensor.is_floating_point():
                if tensor.dim() < 2:
                    tensor.add_(torch.randn_like(tensor), alpha=0.05)
                elif not tensor.any():
                    tensor.normal_(std=0.1)
