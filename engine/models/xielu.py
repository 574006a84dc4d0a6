"""The learned numbers of an xIELU activation, as every backend needs them."""

import math
from collections.abc import Callable

from pdserve.engine.models.config import UnsupportedModel
from pdserve.engine.models.parts import Xielu
from pdserve.engine.weights import RawTensor
from pdserve.engine.weights.convert import unpack


def xielu_curve(part: Xielu, weights: Callable[[str], RawTensor]) -> dict[str, float]:
    """Load the parameters of an xIELU and return the numbers a, b, beta and eps of its formula.
    Raises UnsupportedModel if a parameter is infinite or NaN."""
    loaded = {spec.name: float(unpack(weights(spec.name)).item()) for spec in part.tensors()}
    for name, value in loaded.items():
        if not math.isfinite(value):
            raise UnsupportedModel(f"tensor {name} is {value}: expected a finite number")
    alpha_p, alpha_n, beta, eps = loaded.values()
    return {"a": _softplus(alpha_p), "b": beta + _softplus(alpha_n), "beta": beta, "eps": eps}


def _softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))
