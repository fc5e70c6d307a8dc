"""A plugin that is correct, and copies of it with one fault each: the conformance kit must find every one.

A kit is worth what it finds. Third parties may use `ReferencePlugin` as a short example of a whole plugin.
"""

from __future__ import annotations

from booster_testing.mutants.gradients import (
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
from booster_testing.mutants.parameters import (
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
from booster_testing.mutants.pipeline import (
    DropsLastMicrobatch,
    ReferencePipelinePlugin,
    ReversesOutputs,
    TakesOneBatchAhead,
)
from booster_testing.mutants.reference import ReferencePlugin
from booster_testing.mutants.state import (
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
    "ReferencePipelinePlugin",
    "ReferencePlugin",
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
