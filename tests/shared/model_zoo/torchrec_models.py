"""torchrec recommenders: dense features, and bags of ids of any length that are looked up in embedding tables."""

import torch
from torch.nn.functional import binary_cross_entropy, binary_cross_entropy_with_logits

from model_zoo.registry import ZooModel

_DENSE, _DIM, _ROWS = 6, 8, 20
_KEYS = ["user", "item", "place"]


def _tables():
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(name=f"of_{key}", embedding_dim=_DIM, num_embeddings=_ROWS, feature_names=[key])
            for key in _KEYS
        ]
    )


def _dlrm():
    from torchrec.models.dlrm import DLRM

    return DLRM(
        embedding_bag_collection=_tables(),
        dense_in_features=_DENSE,
        dense_arch_layer_sizes=[16, _DIM],
        over_arch_layer_sizes=[8, 1],
    )


def _deepfm():
    from torchrec.models.deepfm import SimpleDeepFMNN

    return SimpleDeepFMNN(
        num_dense_features=_DENSE,
        embedding_bag_collection=_tables(),
        hidden_layer_size=16,
        deep_fm_dimension=8,
    )


def _draw(generator, samples):
    """Return random dense features, bags of zero to three ids for each key, and click labels."""
    from torchrec import KeyedJaggedTensor

    lengths = torch.randint(4, (len(_KEYS) * samples,), generator=generator)
    return {
        "dense_features": torch.randn(samples, _DENSE, generator=generator),
        "sparse_features": KeyedJaggedTensor.from_lengths_sync(
            keys=_KEYS, values=torch.randint(_ROWS, (int(lengths.sum()),), generator=generator), lengths=lengths
        ),
        "clicked": torch.randint(2, (samples, 1), generator=generator).float(),
    }


def _loss(function):
    return lambda output, batch: function(output, batch["clicked"])


MODELS = tuple(
    ZooModel(name=f"torchrec/{name}", build=build, batch=_draw, loss=_loss(loss), needs=("fbgemm_gpu", "torchrec"))
    for name, build, loss in (
        ("dlrm", _dlrm, binary_cross_entropy_with_logits),
        ("deepfm", _deepfm, binary_cross_entropy),
    )
)
