"""`pdserve quantize MODEL OUT` writes a quantized copy of a GGUF model."""

import errno
import sys
from collections.abc import Mapping
from pathlib import Path

from pdserve.cli.options import OptionError, QuantizeSettings, Settings

MEGABYTE = 1_000_000


def run(settings: Settings, positionals: Mapping[str, str]) -> int:
    """Run `pdserve quantize`. Returns 0, or prints a message and returns 1 if the model cannot be
    read or the output file cannot be written."""
    from pdserve.cli.progress import progress_on
    from pdserve.engine.checkpoints import CheckpointError, HubModel, find
    from pdserve.engine.checkpoints.gguf import quantize_gguf
    from pdserve.engine.checkpoints.resolve import resolve
    from pdserve.engine.weights import find_type

    try:
        type = find_type(settings.build(QuantizeSettings).type)
    except ValueError as error:
        raise OptionError(str(error)) from None
    target = Path(positionals["out"])
    view = progress_on(sys.stderr)
    try:
        # Refuse what can be refused before downloading.
        if target.exists():
            raise FileExistsError(errno.EEXIST, "the output file already exists", str(target))
        model = find(positionals["model"])
        if isinstance(model, HubModel) and not model.is_gguf:
            raise CheckpointError(
                f"{model.repo} is a repository: specify one of its GGUF files, as in "
                f"{model.repo}:file.gguf"
            )
        source = resolve(positionals["model"], view.update).path
        if source.is_dir():
            raise CheckpointError(
                f"{source} is a directory, but quantize reads GGUF files: convert it with "
                f"llama.cpp's convert_hf_to_gguf.py, or serve it with --isq {type}, which "
                "quantizes it during loading"
            )
        label = f"{target.name}: quantizing"
        counts = quantize_gguf(source, target, type, lambda part: view.update(label, part))
    except (CheckpointError, OSError) as error:
        view.close()
        print(f"pdserve quantize: {error}", file=sys.stderr)
        return 1
    view.close()
    formats = ", ".join(f"{count} {format}" for format, count in counts.most_common())
    size = target.stat().st_size / MEGABYTE
    print(f"{target}: {size:.0f} MB, from {source.stat().st_size / MEGABYTE:.0f} MB; {formats}")
    return 0
