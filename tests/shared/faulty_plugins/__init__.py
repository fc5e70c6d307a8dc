"""Copies of the kit's reference plugins with one fault each: the conformance kit must find every one."""

from __future__ import annotations

from faulty_plugins.gradients import (
    AveragesNoMoreAfterEvaluation,
    DecidesOverflowLocally,
    FlattensPresentGradients,
    HasNoEffectOfZeroGrad,
    IgnoresErrorIfNonfinite,
    IgnoresNormType,
    KeepsLastMicroBatch,
    NormOfOwnPart,
    SumsGradients,
    SumsGradientsAfterTheFirstStep,
    SyncsModelThatWasBoostedFirst,
    SyncsUnderNoSync,
    WithoutAveraging,
)
from faulty_plugins.parameters import (
    ChangesWeightsInEvaluation,
    ComputesInFP32,
    IgnoresGroups,
    IgnoresWeightDecay,
    OffByOneRounding,
    OffByOneRoundingOutsideOfShards,
    OtherBeta2,
    SameSamples,
    StartsApart,
    UntiesWeights,
)
from faulty_plugins.pipeline import (
    DropsLastMicrobatch,
    ReversesOutputs,
    TakesOneBatchAhead,
)
from faulty_plugins.state import (
    ForgetsBuffers,
    ForgetsExtraState,
    ForgetsMasters,
    ForgetsParameter,
    IgnoresSavedLearningRate,
    SwapsMoments,
)

__all__ = [
    "AveragesNoMoreAfterEvaluation",
    "ChangesWeightsInEvaluation",
    "ComputesInFP32",
    "DecidesOverflowLocally",
    "DropsLastMicrobatch",
    "FlattensPresentGradients",
    "ForgetsBuffers",
    "ForgetsExtraState",
    "ForgetsMasters",
    "ForgetsParameter",
    "HasNoEffectOfZeroGrad",
    "IgnoresErrorIfNonfinite",
    "IgnoresGroups",
    "IgnoresNormType",
    "IgnoresSavedLearningRate",
    "IgnoresWeightDecay",
    "KeepsLastMicroBatch",
    "NormOfOwnPart",
    "OffByOneRounding",
    "OffByOneRoundingOutsideOfShards",
    "OtherBeta2",
    "ReversesOutputs",
    "SameSamples",
    "StartsApart",
    "SumsGradients",
    "SumsGradientsAfterTheFirstStep",
    "SwapsMoments",
    "SyncsModelThatWasBoostedFirst",
    "SyncsUnderNoSync",
    "TakesOneBatchAhead",
    "UntiesWeights",
    "WithoutAveraging",
]
