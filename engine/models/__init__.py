"""Transformer models described as lists of parts (products, norms, attention), and the decoders
that compute those parts."""

from pdserve.engine.models.classifier import (
    CLASSIFIER_DENSE,
    CLASSIFIER_NORM,
    CLASSIFIER_OUT,
    Classifier,
    ScoreHead,
)
from pdserve.engine.models.config import (
    Encoder,
    LayerConfig,
    ModelConfig,
    NormPlacement,
    UnsupportedModel,
)
from pdserve.engine.models.experts import MixtureOfExperts, stored_experts
from pdserve.engine.models.identity import configuration_digest, kv_identity, numerics_id
from pdserve.engine.models.interleaved import interleaved_rope
from pdserve.engine.models.kv_error import int8_warning
from pdserve.engine.models.latent import LatentAttention
from pdserve.engine.models.layer import (
    EMBEDDING,
    EMBEDDING_NORM,
    HEAD,
    HEAD_BIAS,
    PRE_NORMS,
    layer_parts,
    linear,
    qkv_sizes,
    tensor_shapes,
)
from pdserve.engine.models.native import NativeDecoder
from pdserve.engine.models.parts import (
    Activate,
    Attention,
    ExpertRouting,
    Experts,
    Gate,
    HeadLinear,
    Linear,
    Part,
    TensorSpec,
    Xielu,
)
from pdserve.engine.models.positions import POSITIONS, TYPES, LearnedPositions
from pdserve.engine.models.rope import BY_CONTEXT, QueryScaledRope
from pdserve.engine.models.spec import ModelSpec, TextModel, is_mtp, scorer_of, text_of, under_model
