"""The loss over chunks of logits against `torch.nn.functional.cross_entropy` over all of them."""

import copy

import pytest
import torch
from compiler_warnings import ignore_compiler_warnings
from torch import nn
from torch.nn import functional

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_runtime import enable_linear_cross_entropy, linear_cross_entropy, vocabulary_loss
from booster_testing.memory import peak_memory
from booster_testing.models import tiny_llama


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(vocabulary_loss, "_CHUNK_BYTES", 200)
    monkeypatch.setattr(vocabulary_loss, "_BLOCK_BYTES", 60)


def make(dtype=torch.float64, *, bias=True, scale=1.0):
    torch.manual_seed(0)
    head = nn.Linear(4, 7, bias=bias).to(dtype)
    hidden = (torch.randn(2, 5, 4) * scale).to(dtype).requires_grad_()
    labels = torch.randint(7, (2, 5))
    labels[0, 1] = labels[1, 4] = -100
    return hidden, head, labels


def gradients(loss, hidden, head):
    return torch.autograd.grad(loss * 3, [hidden, *head.parameters()], retain_graph=True)


def whole(hidden, head, labels, **options):
    return functional.cross_entropy(head(hidden).flatten(0, -2), labels.flatten(), **options)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reduction": "sum"},
        {"ignore_index": 3},
    ],
)
def test_it_equals_that_of_whole_logits_to_rounding(options, bias):
    hidden, head, labels = make(bias=bias)
    labels[labels < 0] = options.get("ignore_index", -100)
    actual, expected = linear_cross_entropy(hidden, head, labels, **options), whole(hidden, head, labels, **options)
    torch.testing.assert_close(actual, expected, rtol=1e-14, atol=1e-14)
    for _ in range(2):  # a graph that is kept gives the same again
        for one, other in zip(gradients(actual, hidden, head), gradients(expected, hidden, head), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("scale", [1.0, 30.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_formats_are_as_near_to_the_truth_as_whole_logits(dtype, scale):
    hidden, head, labels = make(dtype, scale=scale)
    wide = copy.deepcopy(head).double()
    exact = hidden.detach().double().requires_grad_()
    truth = gradients(whole(exact, wide, labels), exact, wide)

    def error(loss):
        found = gradients(loss, hidden, head)
        return [(one.double() - other).norm() / other.norm() for one, other in zip(found, truth, strict=True)]

    # As models of transformers do, with logits in fp32.
    plain = functional.cross_entropy(head(hidden).float().flatten(0, -2), labels.flatten())
    ours = linear_cross_entropy(hidden, head, labels)
    for by_chunks, by_whole in zip(error(ours), error(plain), strict=True):
        assert by_chunks < max(2 * by_whole, torch.finfo(dtype).eps)


def test_under_autocast_products_are_narrow_and_gradients_as_wide_as_parameters():
    hidden, head, labels = make(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        actual = linear_cross_entropy(hidden, head, labels)
        expected = whole(hidden, head, labels)
    assert actual.dtype == torch.float32
    for one, other in zip(gradients(actual, hidden, head), gradients(expected, hidden, head), strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-3)


def test_what_is_frozen_gets_no_gradient():
    hidden, head, labels = make()
    head.requires_grad_(False)
    linear_cross_entropy(hidden, head, labels).backward()
    assert head.weight.grad is None
    assert hidden.grad is not None
    with torch.no_grad():
        assert not linear_cross_entropy(hidden, head, labels).requires_grad


def test_tokens_may_all_be_ignored():
    hidden, head, labels = make()
    assert linear_cross_entropy(hidden, head, labels.fill_(-100)).isnan()  # as torch's
    linear_cross_entropy(hidden, head, labels, reduction="sum").backward()
    assert not hidden.grad.any()


def test_a_second_backward_needs_the_graph():
    hidden, head, labels = make()
    loss = linear_cross_entropy(hidden, head, labels)
    loss.backward()
    with pytest.raises(RuntimeError, match="retain_graph"):
        loss.backward()


def test_labels_outside_of_the_vocabulary_raise():
    hidden, head, labels = make()
    labels[0, 0] = 7
    with pytest.raises(RuntimeError, match="out of bounds"):
        linear_cross_entropy(hidden, head, labels)
    assert "forward" not in vars(head)


def test_what_is_no_linear_head_is_refused():
    hidden, head, labels = make()
    with pytest.raises(ConfigError, match="a Sequential"):
        linear_cross_entropy(hidden, nn.Sequential(head), labels)
    with pytest.raises(ConfigError, match=r"\(2, 4\) do not fit hidden states of shape \(2, 5, 4\)"):
        linear_cross_entropy(hidden, head, labels[:, 1:])
    with pytest.raises(ValueError, match="'none'` is none of"):
        linear_cross_entropy(hidden, head, labels, reduction="none")
    head.forward = lambda hidden: hidden
    with pytest.raises(ConfigError, match="a forward of function"):
        linear_cross_entropy(hidden, head, labels)


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16])
def test_it_needs_a_fraction_of_the_memory(monkeypatch, dtype):
    monkeypatch.undo()
    monkeypatch.setattr(vocabulary_loss, "_CHUNK_BYTES", 1 << 22)
    head = nn.Linear(16, 1 << 14, bias=False, dtype=dtype)
    hidden, labels = torch.randn(2048, 16, dtype=dtype, requires_grad=True), torch.randint(1 << 14, (2048,))

    def train(loss):
        for _ in range(2):  # the first one loads kernels
            head.zero_grad()
            with peak_memory() as peak:
                loss(hidden, head, labels).backward()
        return peak.peak_bytes

    def plain(hidden, head, labels):  # as models of transformers do
        return functional.cross_entropy(head(hidden).float(), labels)

    assert train(linear_cross_entropy) < 0.15 * train(plain)


def batch():
    tokens = torch.randint(64, (3, 9), generator=torch.Generator().manual_seed(0))
    labels = tokens.clone()
    labels[0, :4] = -100
    return {"input_ids": tokens, "labels": labels}


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_of_transformers_has_its_own_loss(tied):
    plain = tiny_llama(tie_word_embeddings=tied).train()
    changed = copy.deepcopy(plain)
    enable_linear_cross_entropy(changed)
    changed = copy.deepcopy(changed)  # a copy has hooks of its own
    for options in ({}, {"num_items_in_batch": 7}, {"shift_labels": batch()["labels"]}):
        outputs, expected = changed(**batch(), **options), plain(**batch(), **options)
        assert outputs.logits is None
        torch.testing.assert_close(outputs.loss, expected.loss)
        outputs.loss.backward()
        expected.loss.backward()
        for one, other in zip(changed.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)
    assert changed(**batch(), return_dict=False)[1] is None
    tokens = batch()["input_ids"]
    torch.testing.assert_close(changed(tokens).logits, plain(tokens).logits)
    outputs = changed.eval()(**batch())
    torch.testing.assert_close(outputs.logits, plain.eval()(**batch()).logits)
    assert not vars(changed.lm_head).keys() - vars(plain.lm_head).keys()


def test_a_call_that_raises_leaves_the_model_as_it_was():
    model = tiny_llama().train()
    enable_linear_cross_entropy(model)
    with pytest.raises(IndexError):
        model(input_ids=torch.tensor([[64]]), labels=torch.tensor([[1]]))
    assert model(**batch()).logits is None


def model_of(kind, **changes):
    import transformers

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    config = {**sizes, "num_key_value_heads": 2, "num_hidden_layers": 1, "head_dim": 8, "pad_token_id": 0, **changes}
    known = getattr(transformers, f"{kind}Config")
    head = "ForMaskedLM" if kind == "Bert" else "ForCausalLM"
    return getattr(transformers, kind + head)(known(**config, bos_token_id=1, eos_token_id=2)).train()


@pytest.mark.parametrize(("kind", "changes"), [("Gemma2", {}), ("Cohere", {}), ("Granite", {"logits_scaling": 2.0})])
def test_models_that_scale_or_cap_their_logits_are_refused(kind, changes):
    model = model_of(kind, **changes)
    enable_linear_cross_entropy(model)
    with pytest.raises(ConfigError, match="changes its head's outputs"):
        model(**batch())
    assert model.eval()(**batch()).logits is not None


def test_other_models_are_refused():
    with pytest.raises(ConfigError, match="is not that of causal language models"):
        enable_linear_cross_entropy(model_of("Bert"))
    with pytest.raises(ConfigError, match="return `linear_cross_entropy"):
        enable_linear_cross_entropy(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"needs a torch\.nn\.Module"):
        enable_linear_cross_entropy(3)
    model = tiny_llama()
    enable_linear_cross_entropy(model)
    with pytest.raises(ConfigError, match="already"):
        enable_linear_cross_entropy(model)
    boosted, *_ = Booster().boost(tiny_llama())
    with pytest.raises(ConfigError, match="before `boost`"):
        enable_linear_cross_entropy(boosted)


def test_adapters_on_layers_and_not_on_the_head_are_fine():
    import peft

    plain = tiny_llama().train()
    add = Booster().enable_lora
    model = add(copy.deepcopy(plain), lora_config=peft.LoraConfig(target_modules=["q_proj"]))
    enable_linear_cross_entropy(model)
    outputs = model.train()(**batch())
    assert outputs.logits is None
    torch.testing.assert_close(outputs.loss, plain(**batch()).loss)
    on_head = add(plain, lora_config=peft.LoraConfig(target_modules=["lm_head"]))
    with pytest.raises(ConfigError, match="not a linear layer"):
        enable_linear_cross_entropy(on_head)


def test_compiled_models_break_their_graph_at_the_head():
    ignore_compiler_warnings()
    model = tiny_llama().train()
    expected = model(**batch()).loss
    enable_linear_cross_entropy(model)
    outputs = torch.compile(model, backend="eager")(**batch())
    assert outputs.logits is None
    torch.testing.assert_close(outputs.loss, expected)
