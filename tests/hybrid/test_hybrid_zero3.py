"""`zero_stage=3` gives one process's gradients, norms and parameters, on every mesh and in every precision."""

from functools import partial

import pytest
from cases import Case, Setting, assert_equals_one_process, decayed, tokens, train_boosted
from hybrid_runs import RING, SPLIT_GATHER, ULYSSES
from matrix import matrix

from booster_hybrid import HybridParallelPlugin
from booster_testing import run_on_ranks
from booster_testing.compare import EXACT, assert_same_tensors
from booster_testing.models import tiny_llama
from booster_zero import ZeroConfig

LLAMA = partial(tiny_llama, num_hidden_layers=4)
"""Its layers fill four stages."""
TIED, UNTIED = (
    Case(build=partial(LLAMA, tie_word_embeddings=tied), batch=tokens(2, 8), optimizer=decayed, micro_batches=2)
    for tied in (True, False)
)


def setting_of(options, num_ranks, precision=None):
    return Setting(HybridParallelPlugin, {"zero_stage": 3, **options}, num_ranks, precision)


PP, TP = {"pp_size": 2}, {"tp_size": 2}

MESHES = {
    "dp3": (3, {}),
    "dp2 tp2": (4, TP),
    "dp2 pp2": (4, PP),
    "dp2 pp2 zbv": (4, {**PP, "pp_style": "zbv"}),
    "dp2 ring2": (4, RING),
    "dp2": (2, {}),
    "dp2 parts": (2, {"zero": ZeroConfig(stage=3, bucket_bytes=4096, overlap_communication=False), "zero_stage": 0}),
    "dp2 host": (2, {"cpu_offload": True}),
    "dp2 pp2 interleaved": (4, {**PP, "pp_style": "interleaved", "num_model_chunks": 2}),
    "dp2 pp2 gpipe": (4, {**PP, "pp_style": "gpipe"}),
    "dp2 sp2": (4, ULYSSES),
    "dp2 split_gather": (4, SPLIT_GATHER),
    "dp2 tp2 outside": (4, {**TP, "mesh_order": ("tp", "sp", "pp", "dp")}),
    "dp2 tp2 pp2": (8, {**PP, **TP}),
    "alone": (1, {}),
    "tp2 alone": (2, TP),
}


@matrix(["dp2 tp2", "dp2 pp2"], mesh=MESHES)
def test_gradients_norms_and_parameters_equal_one_process(mesh):
    size, options = MESHES[mesh]
    assert_equals_one_process(UNTIED if "split" in mesh else TIED, setting_of(options, size))


@pytest.mark.parametrize("options", [TP, pytest.param(PP, marks=pytest.mark.slow)], ids=["tp2", "pp2"])
@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.slow)])
def test_narrow_formats_round_as_in_stage_2(options, precision):
    """Gradients are reduced in the same order in the same format, and masters are fp32's in both."""
    settings = [setting_of({**options, "zero_stage": stage}, 4, precision) for stage in (2, 3)]
    (expected, *_), results = (run_on_ranks(train_boosted, 4, TIED, setting) for setting in settings)
    for result in results:
        assert result.trained.norms == pytest.approx(expected.trained.norms, rel=1e-6)
        assert_same_tensors(result.trained.parameters, expected.trained.parameters, EXACT)
