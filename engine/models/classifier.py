"""The head of a cross-encoder, which makes the score of a pair of texts from the pooled state of
its prompt: an optional dense layer with an activation and a norm, then one weighted sum."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

DENSE, NORM, SCORE = "score.dense", "score.norm", "score.out"
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Classifier:
    """The settings of a head with one label."""

    pooling: Literal["last", "mean", "cls"]  # of the final hidden states
    activation: Literal["tanh", "gelu", ""] = ""  # of the dense layer; empty: there is none
    dense_bias: bool = True
    norm_eps: float = 0.0  # of a layer norm behind the activation; 0: there is none
    norm_bias: bool = False
    bias: bool = True
    sigmoid: bool = True  # of the sum, so that a score is from 0 to 1

    def shapes(self, hidden_size: int) -> Mapping[str, tuple[int, ...]]:
        """Return the names and shapes of the tensors, in the order of loading."""
        shapes: dict[str, tuple[int, ...]] = {}
        if self.activation:
            shapes[f"{DENSE}.weight"] = (hidden_size, hidden_size)
            if self.dense_bias:
                shapes[f"{DENSE}.bias"] = (hidden_size,)
        if self.norm_eps:
            shapes[f"{NORM}.weight"] = (hidden_size,)
            if self.norm_bias:
                shapes[f"{NORM}.bias"] = (hidden_size,)
        shapes[f"{SCORE}.weight"] = (1, hidden_size)
        if self.bias:
            shapes[f"{SCORE}.bias"] = (1,)
        return shapes


class ScoreHead:
    """Computes scores. Sums are float64, so that a score does not depend on their order."""

    def __init__(
        self,
        classifier: Classifier,
        hidden_size: int,
        vectors: Callable[[str], NDArray[np.float32]],
    ) -> None:
        """`vectors` returns a tensor by name and is called once for each."""
        self.pooling = classifier.pooling
        self._classifier = classifier
        self._tensors = {
            name: vectors(name).astype(np.float64) for name in classifier.shapes(hidden_size)
        }

    def __call__(self, state: NDArray[np.float32]) -> float:
        """Return the score of a pooled state, float32 [hidden]."""
        x: Floats = state.astype(np.float64)
        if self._classifier.activation:
            x = self._linear(DENSE, x)
            x = np.tanh(x) if self._classifier.activation == "tanh" else _gelu(x)
        if self._classifier.norm_eps:
            x = (x - x.mean()) / np.sqrt(x.var() + self._classifier.norm_eps)
            x = x * self._tensors[f"{NORM}.weight"] + self._bias(NORM)
        score = float(self._linear(SCORE, x)[0])
        return 1 / (1 + math.exp(-max(score, -700.0))) if self._classifier.sigmoid else score

    def _linear(self, name: str, x: Floats) -> Floats:
        product: Floats = self._tensors[f"{name}.weight"] @ x + self._bias(name)
        return product

    def _bias(self, name: str) -> Floats | float:
        return self._tensors.get(f"{name}.bias", 0.0)


def _gelu(x: Floats) -> Floats:
    erf = np.array([math.erf(value / math.sqrt(2)) for value in x])
    gelu: Floats = x * (1 + erf) / 2
    return gelu
