"""The head of a cross-encoder, which makes the score of a pair of texts from the pooled state of
its prompt: an optional dense layer with an activation and a norm, then one weighted sum."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pdserve.kernels import _native
from pdserve.kernels.cpu import CpuKernels

CLASSIFIER_DENSE, CLASSIFIER_NORM = "score.dense", "score.norm"
CLASSIFIER_OUT = "score.out"
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Classifier:
    """The settings of a head with one label."""

    pooling: Literal["last", "mean", "cls"]  # of the final hidden states
    activation: Literal["tanh", "gelu", ""] = ""  # of the dense layer; empty: there is none
    dense_bias: bool = True
    norm_eps: float = 0.0  # of a layer norm after the activation; 0: there is none
    norm_bias: bool = False
    bias: bool = True
    sigmoid: bool = True  # of the sum, so that a score is from 0 to 1

    def shapes(self, hidden_size: int) -> Mapping[str, tuple[int, ...]]:
        """Return the names and shapes of the tensors, in the order of loading."""
        shapes: dict[str, tuple[int, ...]] = {}
        if self.activation:
            shapes[f"{CLASSIFIER_DENSE}.weight"] = (hidden_size, hidden_size)
            if self.dense_bias:
                shapes[f"{CLASSIFIER_DENSE}.bias"] = (hidden_size,)
        if self.norm_eps:
            shapes[f"{CLASSIFIER_NORM}.weight"] = (hidden_size,)
            if self.norm_bias:
                shapes[f"{CLASSIFIER_NORM}.bias"] = (hidden_size,)
        shapes[f"{CLASSIFIER_OUT}.weight"] = (1, hidden_size)
        if self.bias:
            shapes[f"{CLASSIFIER_OUT}.bias"] = (1,)
        return shapes


class ScoreHead:
    """Computes scores with the native CPU kernels on one thread, in float32. Their results have the
    same bits on every instruction set; tanh and the sigmoid are computed in float64."""

    def __init__(
        self,
        classifier: Classifier,
        hidden_size: int,
        vectors: Callable[[str], NDArray[np.float32]],
    ) -> None:
        """`vectors` returns a tensor by name and is called once for each."""
        self.pooling = classifier.pooling
        self._classifier = classifier
        self._kernels = CpuKernels(threads=1)
        self._vectors: dict[str, Floats] = {}
        self._matrices: dict[str, _native.Matrix] = {}
        for name, shape in classifier.shapes(hidden_size).items():
            if len(shape) == 2:
                self._matrices[name] = self._kernels.pack(vectors(name), "F32", *shape)
            else:
                self._vectors[name] = np.ascontiguousarray(vectors(name), np.float32)

    def __call__(self, state: NDArray[np.float32]) -> float:
        """Return the score of a pooled state, float32 [hidden]."""
        x = state[None]
        if self._classifier.activation:
            x = self._linear(CLASSIFIER_DENSE, x)
            x = _tanh(x) if self._classifier.activation == "tanh" else self._gelu(x)
        if self._classifier.norm_eps:
            x = self._norm(x)
        score = float(self._linear(CLASSIFIER_OUT, x)[0, 0])
        return 1 / (1 + math.exp(-max(score, -700.0))) if self._classifier.sigmoid else score

    def _linear(self, name: str, x: Floats) -> Floats:
        matrix = self._matrices[f"{name}.weight"]
        out = np.empty((1, matrix.rows), np.float32)
        bias = self._vectors.get(f"{name}.bias")
        _native.linear_into(self._kernels.context, x, [matrix], out, bias)
        return out

    def _gelu(self, x: Floats) -> Floats:
        out = np.empty_like(x)
        _native.gated(self._kernels.context, x, np.ones_like(x), "gelu", out)
        return out

    def _norm(self, x: Floats) -> Floats:
        weight = self._vectors[f"{CLASSIFIER_NORM}.weight"]
        bias = self._vectors.get(f"{CLASSIFIER_NORM}.bias", np.zeros_like(weight))
        out, eps = np.empty_like(x), self._classifier.norm_eps
        _native.layer_norm(self._kernels.context, x, weight, bias, eps, out)
        return out


def _tanh(x: Floats) -> Floats:
    return np.tanh(x.astype(np.float64)).astype(np.float32)
