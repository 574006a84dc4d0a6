"""Selects a GGUF file of a repository by the tag of its quantization, which file names end with."""

import re
from collections.abc import Iterable, Sequence

from pdserve.engine.checkpoints.source import CheckpointError

# "-Q4_K_M", ".Q4_1", "-IQ2_XXS", "-UD-Q2_K_XL", "-bf16", "-MXFP4_MOE"
QUANT_SUFFIX = re.compile(
    r"[-._]((UD[-._])?(I?Q\d\w*|TQ\d\w*|B?F16|FP16|F32|BF16|MXFP4\w*|NVFP4\w*))$", re.IGNORECASE
)
PART_SUFFIX = re.compile(r"-(\d{5})-of-\d{5}$")
_PART_NUMBER = re.compile(r"-\d{5}(?=-of-\d{5}\.gguf$)")
# Without a tag: the usual 4-bit type, then its neighbours, then more bits.
PREFERRED = ("Q4_K_M", "Q4_K_S", "Q4_0", "Q4_1", "Q5_K_M", "Q5_K_S", "Q6_K", "Q8_0")
NO_TAG = ("", "LATEST")
NOT_WEIGHTS = re.compile(r"(^|/)(mmproj|imatrix)|imatrix", re.IGNORECASE)


def gguf_models(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the models among the files of a repository: the name of each model's GGUF file, or of
    its first part, and the names of all its parts in order. A model without its first part is left
    out, and so are GGUF files that are not models, such as image encoders."""
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        if name.endswith(".gguf") and not NOT_WEIGHTS.search(name):
            first = _PART_NUMBER.sub("-00001", name)
            models.setdefault(first, []).append(name)
    return {first: parts for first, parts in models.items() if first in parts}


def choose_file(names: Sequence[str], tag: str, repo: str) -> str:
    """Return the name of the GGUF file with this tag, e.g. "Q4_K_M" in any case; without a tag, of
    the first type in PREFERRED that `names` contains, or else of the first file by name. Of a model
    in parts, it is the first part. Raises CheckpointError, which lists the tags of the repository,
    if there is no such file."""
    files: dict[str, str] = {}
    for name in gguf_models(names):
        stem = name.removesuffix(".gguf")
        quant = QUANT_SUFFIX.search(PART_SUFFIX.sub("", stem))
        files.setdefault(quant[1].upper() if quant else stem.upper(), name)
    if not files:
        raise CheckpointError(f"the hub repository {repo} has no GGUF file")
    is_tagged = tag.upper() not in NO_TAG
    for wanted in (tag.upper(),) if is_tagged else PREFERRED:
        for name in (wanted, f"UD-{wanted}"):  # UD: the dynamic types of Unsloth
            if name in files:
                return files[name]
    if is_tagged:
        raise CheckpointError(
            f"the hub repository {repo} has no GGUF file with the tag {tag}; it has "
            f"{', '.join(files)}"
        )
    return next(iter(files.values()))
