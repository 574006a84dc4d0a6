"""Sampling of a step on the device: `stream`, `sample` and `logprobs` of kernels/sampling_ops.py.

A sample is the choice of one stream's next token. A step is one upload (a record per sample, ids
and masks), two to five launches for any number of samples, and one copy back. A sample depends only
on its logits and stream.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.kernels.cuda.sampling.candidates import floors_of
from pdserve.kernels.cuda.sampling.logit_edits import edit, new_bias, new_marks
from pdserve.kernels.cuda.sampling.logprobs import logprobs
from pdserve.kernels.cuda.sampling.records import RECORD
from pdserve.kernels.cuda.sampling.samples import Survey
from pdserve.kernels.sampling_ops import GREEDY_BELOW, Mask, StreamSettings, TokenScores


class CudaTokenStream:
    """The sampling state of one token stream: the constant part of its samples' records, and its
    marks on the device once its logits are edited.

    The stream owns these tensors. A step that still runs may read them after they are freed,
    because the allocator reuses memory only in the order of the device's stream.
    """

    def __init__(self, settings: StreamSettings, vocab: int) -> None:
        _check(settings, vocab)
        self.settings = settings
        self.vocab = vocab
        is_sampled = settings.temperature >= GREEDY_BELOW
        self.is_filtered = is_sampled and settings.filters
        self.always_edits = settings.penalizes or bool(settings.logit_bias)
        self.hides_until = settings.min_tokens if settings.masked_ids else 0
        self.num_counted = 0
        self._tensors: list[Tensor] = []
        constant = np.zeros((), RECORD)
        constant["seed"] = settings.seed
        constant["choice"] = settings.choice
        constant["edited"] = constant["mask"] = -1
        constant["temperature"] = settings.temperature if is_sampled else 0
        constant["top_k"] = settings.top_k if self.is_filtered else 0
        constant["top_p"] = settings.top_p if self.is_filtered else 1
        has_min_p = self.is_filtered and settings.min_p > 0
        constant["log_min_p"] = math.log(settings.min_p) if has_min_p else -math.inf
        constant["repetition"] = settings.repetition_penalty
        constant["presence"] = settings.presence_penalty
        constant["frequency"] = settings.frequency_penalty
        self._constant = constant
        self.record = constant.tobytes()

    def edits(self, num_generated: int) -> bool:
        """Return whether bias, penalties or hidden ids edit the logits of the stream's next sample;
        masks do not count."""
        return self.always_edits or num_generated < self.hides_until

    def to_device(self, device: torch.device) -> None:
        """Create the stream's tensors of marks and bias on the device, if it needs them; later
        calls do nothing."""
        if self._tensors or not (self.always_edits or self.hides_until):
            return
        if self.settings.penalizes or self.hides_until:
            marks = new_marks(self.settings, self.vocab, device)
            self._constant["marks"] = marks.data_ptr()
            self._tensors.append(marks)
        if self.settings.logit_bias:
            bias = new_bias(self.settings, self.vocab, device)
            self._constant["bias"] = bias.data_ptr()
            self._tensors.append(bias)
        self.record = self._constant.tobytes()

    def fresh(self, generated: Sequence[int]) -> Sequence[int]:
        """Return the words that update the stream's marks: generated ids that the marks do not
        count yet, and -1 - id for each id that left the penalty window. Raises ValueError if
        `generated` became shorter, or has an id outside the vocabulary."""
        if not self.settings.penalizes:
            return []
        if len(generated) < self.num_counted:
            raise ValueError(
                f"generated: shorter than at the stream's last sample: {len(generated)} ids, "
                f"expected at least {self.num_counted}"
            )
        ids, removed = self.settings.penalty_changes(generated, self.num_counted)
        if ids and not (min(ids) >= 0 and max(ids) < self.vocab):
            raise ValueError(f"generated: an id is outside the vocabulary of {self.vocab}")
        return [*ids, *(-1 - token for token in removed)] if removed else ids


class CudaSampledTokens:
    """The tokens of launched samples on the device, and their queued copy to the host."""

    def __init__(self, tokens: Tensor) -> None:
        """Queue the copy of `tokens`, int32 [samples], to the host; the current stream computes
        them."""
        self.tokens = tokens
        self._copied: torch.cuda.Event | None = None
        self._host = tokens
        if tokens.is_cuda:
            self._host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
            self._host.copy_(tokens, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def read(self) -> list[int]:
        """Wait for the copy of the tokens to the host and return them."""
        if self._copied is not None:
            self._copied.synchronize()
        tokens: list[int] = self._host.tolist()
        return tokens


class CudaSampling:
    """Sampling on one CUDA stream of the logits' device; a step samples one token for each token
    stream."""

    def __init__(self, stream: torch.cuda.Stream | None = None) -> None:
        """`stream` is the CUDA stream to launch on; None means the current stream of the calling
        thread."""
        self._stream = stream

    def stream(self, settings: StreamSettings, vocab: int) -> CudaTokenStream:
        """Create the sampling state of a token stream. Raises ValueError for invalid settings or
        ids."""
        return CudaTokenStream(settings, vocab)

    def sample(
        self,
        logits: Tensor,
        rows: list[int],
        streams: list[CudaTokenStream],
        generated: list[list[int]],
        masks: list[Mask | None] | None = None,
    ) -> list[int]:
        """Sample the next token of each stream like kernels/reference/sampling.py, in one step on
        the device."""
        if not rows:
            return []
        with torch.cuda.stream(self._stream):
            return CudaSampledTokens(self.launch(logits, rows, streams, generated, masks)).read()

    def begin(
        self,
        logits: Tensor,
        rows: list[int],
        streams: list[CudaTokenStream],
        num_generated: list[int],
    ) -> CudaSampledTokens:
        """Launch sampling without waiting for the tokens, as AheadSampling.begin defines; at least
        one stream."""
        with torch.cuda.stream(self._stream):
            return CudaSampledTokens(
                self.launch(logits, rows, streams, list(map(range, num_generated)))
            )

    @torch.inference_mode()
    def launch(
        self,
        logits: Tensor,
        rows: list[int],
        streams: list[CudaTokenStream],
        generated: Sequence[Sequence[int]],
        masks: list[Mask | None] | None = None,
    ) -> Tensor:
        """Launch at least one sample; return the tokens, int32 [samples] on the device, without
        waiting for them. For streams without penalties, only the lengths of `generated` matter.

        Raises ValueError for a row, an id, a mask or a vocabulary that does not match, TypeError
        for logits that are not float32 with adjacent columns.
        """
        vocab = _check_step(logits, rows, streams, generated, masks)
        num_samples, device = len(rows), logits.device
        edited = [
            i
            for i, stream in enumerate(streams)
            if stream.edits(len(generated[i])) or (masks and masks[i] is not None)
        ]
        filtered = [i for i, stream in enumerate(streams) if stream.is_filtered]
        fresh = [streams[i].fresh(generated[i]) for i in edited]
        for i in edited:
            streams[i].to_device(device)

        packed = np.frombuffer(bytearray(b"".join([s.record for s in streams])), RECORD)
        packed["row"] = rows
        packed["position"] = [len(ids) for ids in generated]
        words = _add_edits(packed, edited, fresh, streams, generated, masks)
        lists = np.array([*edited, *filtered], np.int32)
        uploaded = _upload(
            [packed.view(np.uint8), lists.view(np.uint8), words.view(np.uint8)], device
        )
        records, numbers = uploaded[: packed.nbytes], uploaded[packed.nbytes :].view(torch.int32)
        edited_samples, filtered_samples = numbers[: len(edited)], numbers[len(edited) : len(lists)]

        scores = logits
        if edited:
            scores = edit(records, numbers[len(lists) :], edited_samples, logits, vocab)
            for i in edited:
                streams[i].num_counted = len(generated[i])
        survey = Survey(records, logits, scores, vocab, num_samples)
        floors = survey.best  # read for filtered samples only
        if filtered:
            floors = floors_of(survey, filtered_samples)
            survey.bound_filtered(filtered_samples, floors)
        return survey.choose(floors)

    def logprobs(
        self, logits: Tensor, tokens: list[int], count: int, also: Sequence[int] = ()
    ) -> list[TokenScores]:
        """Return log-probabilities like kernels/reference/sampling.py, with sums in doubles."""
        with torch.cuda.stream(self._stream):
            return logprobs(logits, tokens, count, also)


def _add_edits(
    packed: NDArray[np.void],
    edited: list[int],
    fresh: list[Sequence[int]],
    streams: list[CudaTokenStream],
    generated: Sequence[Sequence[int]],
    masks: list[Mask | None] | None,
) -> NDArray[np.int32]:
    """Fill in the edit fields of the records; return the words that these fields point to: ids that
    update the marks, and masks."""
    parts: list[NDArray[np.int32]] = []
    position = 0
    for slot, (i, ids) in enumerate(zip(edited, fresh, strict=True)):
        record = packed[i]
        record["edited"] = slot
        record["hide"] = len(generated[i]) < streams[i].hides_until
        record["fresh"], record["num_fresh"] = position, len(ids)
        parts.append(np.array(ids, np.int32))
        position += len(ids)
        mask = masks[i] if masks else None
        if mask is not None:
            record["mask"] = position
            parts.append(mask.view(np.int32))
            position += len(mask)
    return np.concatenate(parts) if parts else np.empty(0, np.int32)


def _upload(parts: list[NDArray[np.uint8]], device: torch.device) -> Tensor:
    """Upload arrays of bytes, joined to one tensor, in one asynchronous copy."""
    size = sum(part.nbytes for part in parts)
    # Torch reuses pinned memory only after the copies out of it have ended.
    staged = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    np.concatenate(parts, out=staged.numpy())
    return staged.to(device, non_blocking=True)


def _check_step(
    logits: Tensor,
    rows: list[int],
    streams: list[CudaTokenStream],
    generated: Sequence[Sequence[int]],
    masks: list[Mask | None] | None,
) -> int:
    """Check the arguments of `launch`, and return the size of the vocabulary. Raises ValueError or
    TypeError like `launch`."""
    if logits.dtype != torch.float32 or logits.dim() != 2 or logits.stride(1) != 1:
        raise TypeError("logits: expected float32 [n, vocab] with adjacent columns")
    num_rows, vocab = logits.shape
    if not len(rows) == len(streams) == len(generated):
        raise ValueError("rows, streams and generated must have the same length")
    if not (min(rows) >= 0 and max(rows) < num_rows):
        raise ValueError(f"rows: a row is outside the {num_rows} rows of logits")
    if any(stream.vocab != vocab for stream in streams):
        raise ValueError(
            f"streams: a stream's vocabulary does not have {vocab} ids like the logits"
        )
    if masks is not None:
        if len(masks) != len(rows):
            raise ValueError("masks: expected a mask or None for each sample")
        for mask in masks:
            if mask is None:
                continue
            if mask.dtype != np.uint32 or mask.ndim != 1:
                raise TypeError("masks: expected uint32 [(vocab + 31) // 32]")
            if len(mask) != (vocab + 31) // 32:
                raise ValueError(
                    f"masks: a mask has {len(mask)} words, expected {(vocab + 31) // 32} "
                    f"for {vocab} ids"
                )
    return vocab


def _check(settings: StreamSettings, vocab: int) -> None:
    for name, ids in (
        ("logit_bias", settings.logit_bias),
        ("masked_ids", settings.masked_ids),
        ("prompt_ids", settings.penalized_prompt),
    ):
        if ids and not (min(ids) >= 0 and max(ids) < vocab):
            raise ValueError(f"{name}: an id is outside the vocabulary of {vocab}")
    if not 0 <= settings.temperature < math.inf:
        raise ValueError("temperature: must be a finite number of at least 0")
    if not 0 < settings.top_p <= 1:
        raise ValueError("top_p: must be in (0, 1]")
    if not 0 <= settings.min_p <= 1:
        raise ValueError("min_p: must be in [0, 1]")
