"""Loads a model according to the engine's options: its device, its task, the decoder with its
weights, and the model card. With --isq, weights are quantized while they load; this module chooses
their formats."""

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from pdserve.engine.api import ConfigError, EngineConfig
from pdserve.engine.architectures import find_spec, known_specs
from pdserve.engine.backends import Backend, ModelDecoder, choose
from pdserve.engine.checkpoints import (
    CardData,
    Checkpoint,
    CheckpointError,
    DigestCache,
    Resolved,
    StoredPooling,
    TextCache,
    TextFiles,
    ViewedCheckpoint,
    WeightLoader,
    check_names,
    load_tokenizer,
    quantization_label,
    quantized_digest,
    with_recommended,
)
from pdserve.engine.checkpoints.gguf import GgufCheckpoint, GgufMapping
from pdserve.engine.checkpoints.hf import DirectoryCheckpoint
from pdserve.engine.checkpoints.resolve import resolve
from pdserve.engine.models import (
    BY_CONTEXT,
    EMBEDDING,
    HEAD,
    HEAD_BIAS,
    Activate,
    Attention,
    Experts,
    Gate,
    HeadLinear,
    Linear,
    ModelConfig,
    Part,
    ScoreHead,
    UnsupportedModel,
    Xielu,
    configuration_digest,
    layer_parts,
    tensor_shapes,
    under_model,
)
from pdserve.engine.weights import MatrixRole, Mix, StoredMatrix, find_type
from pdserve.engine.weights.convert import unpack

log = logging.getLogger(__name__)

QKV = (MatrixRole.OTHER, MatrixRole.KEY, MatrixRole.VALUE)


def isq_formats(type: str, model: ModelConfig, checkpoint: ViewedCheckpoint) -> dict[str, str]:
    """Return the quantization format for each matrix, by name, that is stored as plain numbers.
    `type`: a value of --isq.

    Vectors, routers and matrices that are already quantized stay as they are. The formats equal
    those in the file that `pdserve quantize` writes for the same model. Raises CheckpointError if
    no matrix can be quantized.
    """
    n_gqa = model.num_heads // model.num_kv_heads
    mix = Mix(type, model.num_layers, n_gqa, _num_experts(model))
    matrices = (
        StoredMatrix(name, role, layer, stored.format, stored.shape[-1])
        for name, role, layer in _matrices(model, checkpoint)
        for stored in [checkpoint.layout(name)]
    )
    formats, unfit, quantized = mix.plan(matrices)
    if not formats:
        reasons = ", ".join(quantized) or "no row length is a multiple of 32"
        raise CheckpointError(f"--isq {type}: the model has nothing to quantize ({reasons})")
    for format, count in quantized.items():
        log.warning("%d matrices are stored as %s and are not quantized again", count, format)
    for reason, count in unfit.items():
        log.info("%d matrices get another format than planned: %s", count, reason)
    return formats


def _num_experts(model: ModelConfig) -> int:
    parts = (part for n in range(model.num_layers) for part in layer_parts(model, n))
    return next((len(part.experts) for part in parts if isinstance(part, Experts)), 0)


def _matrices(
    model: ModelConfig, checkpoint: ViewedCheckpoint
) -> Iterator[tuple[str, MatrixRole, int]]:
    """Yield the name, the role (for quantization) and the layer number of each matrix of a
    model."""
    yield EMBEDDING, MatrixRole.HEAD if model.tied_head else MatrixRole.OTHER, 0
    for n in range(model.num_layers):
        for name, role in _layer_matrices(layer_parts(model, n), checkpoint):
            yield name, role, n
    if not model.tied_head:
        yield HEAD, MatrixRole.HEAD, model.num_layers - 1


def _layer_matrices(
    parts: tuple[Part, ...], checkpoint: ViewedCheckpoint
) -> Iterator[tuple[str, MatrixRole]]:
    previous: Part | None = None  # the last part that is not a norm
    for part in parts:
        match part:
            case Linear():
                names = [spec.name for spec in part.weights]
                roles = [_role_after(previous)] * len(names)
                if previous is None and len(names) == len(QKV):
                    is_fused = len({checkpoint.source(name) for name in names}) == 1  # one tensor
                    roles = [MatrixRole.VALUE] * len(QKV) if is_fused else [*QKV]
                yield from zip(names, roles, strict=True)
            case HeadLinear():
                yield part.weight.name, MatrixRole.OTHER
            case Experts():
                for expert in (*part.experts, *((part.shared,) if part.shared else ())):
                    yield from ((spec.name, MatrixRole.OTHER) for spec in expert.gate_up.weights)
                    yield from ((spec.name, MatrixRole.DOWN) for spec in expert.down.weights)
        if isinstance(part, Linear | Attention | Gate | Activate | Xielu):
            previous = part


def _role_after(part: Part | None) -> MatrixRole:
    """Return the quantization role of the matrix that follows `part` in a layer: the output
    projection after attention, the down projection after a gate or activation."""
    match part:
        case Attention():
            return MatrixRole.OUTPUT
        case Gate() | Activate() | Xielu():
            return MatrixRole.DOWN
    return MatrixRole.OTHER


YES, NO = "yes", "no"  # answers of a reranker (Qwen3-Reranker)
# Special tokens of Qwen3-Reranker's prompt, which the gateway makes of two texts if the tokenizer
# puts nothing between them.
PROMPT_TOKENS = ("<|im_start|>", "<|im_end|>", "<think>", "</think>")
CAUSAL = {"is_causal": False, "use_bidirectional_attention": True}  # fields of non-causal models
MAX_THREADS = 16
# Like vLLM, normalize the vectors of a model whose files do not say.
DEFAULT_POOLING = StoredPooling("last", normalizes=True)
ENCODER_POOLING = StoredPooling("mean", normalizes=True)
Progress = Callable[[str, float], None]


def resolve_device(device: str) -> str:
    """Return "cpu" or "cuda" for a value of --device; "auto" selects the CPU if no GPU can be used.
    Raises ConfigError for "cuda" if none can be used."""
    if device == "cpu":
        return device
    problem = _gpu_problem()
    if not problem:
        return "cuda"
    if device != "auto":
        raise ConfigError(f"--device {device}: {problem}")
    log.info("--device auto selects the CPU: %s", problem)
    return "cpu"


def _gpu_problem() -> str:
    """Return the reason why this process cannot compute on a GPU; empty if it can."""
    try:
        import torch
    except ModuleNotFoundError:
        return "a GPU needs torch: pip install 'pdserve[torch,cuda]'"
    except (ImportError, OSError) as err:  # a library that torch needs is missing
        return f"torch cannot be imported: {err}"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return "torch finds no GPU; run nvidia-smi to check whether the driver finds one"
    return ""


@dataclass(frozen=True, slots=True)
class ModelTask:
    """Task that a model is loaded for: embeddings if `pooling` is set, scores of a reranker if
    `scores` is set, otherwise text generation, and embeddings too if `pool` is set."""

    pooling: StoredPooling | None = None  # set for an embedding model
    scores: bool = False
    pool: StoredPooling | None = None  # set for a generating model that also embeds

    @property
    def kind(self) -> str:
        """Kind of pooling of an embedding model, "last", "mean" or "cls"; empty for other tasks."""
        return self.pooling.kind if self.pooling else ""

    def of(self, model: ModelConfig) -> ModelConfig:
        """Return the config of the model, adapted to this task.

        An embedding model needs no output head: a head tied to the embedding table costs nothing,
        and a stored head is not loaded. Its context is at most the maximum length given in its
        pooling files.
        """
        if self.pooling is None:
            return model
        max_len = min(model.context_len, self.pooling.max_len or model.context_len)
        return replace(model, tied_head=True, head_bias=False, context_len=max_len)


def find_task(
    config: EngineConfig, checkpoint: Checkpoint, model: ModelConfig, has_head: bool
) -> ModelTask:
    """Return the task of a model, from the options and the checkpoint. `has_head`: the model has an
    output head, which computes logits.

    Raises ConfigError if options contradict each other, and CheckpointError if the model cannot do
    the task.
    """
    for field, value in CAUSAL.items():
        if checkpoint.hf_config.get(field) is value:
            raise CheckpointError(
                f"config field {field}={value} is not supported: attention must be causal"
            )
    task, option = config.task, f"--task {config.task}"  # the option that determines it
    if config.pooling != "auto":
        if task not in ("auto", "embed"):
            raise ConfigError(f"--pooling {config.pooling} contradicts --task {task}")
        task, option = "embed", f"--pooling {config.pooling}"
    if model.classifier:
        if task not in ("auto", "score"):
            raise CheckpointError(f"{option}: the model has a head that can only score")
        if config.pool != "none":
            raise CheckpointError(f"--pool {config.pool}: the model has a head that can only score")
        return ModelTask(StoredPooling(model.classifier.pooling, normalizes=False))
    if config.pool != "none":
        if task not in ("auto", "generate"):
            raise ConfigError(f"--pool {config.pool} contradicts {option}: it is for generation")
        return _find_both(config, checkpoint, has_head)
    if task in ("generate", "score"):
        if not has_head:
            raise CheckpointError(f"--task {task}: the model has no output head and can only embed")
        return ModelTask(scores=task == "score")
    stored = _stored_pooling(config, checkpoint)
    if task == "auto" and stored is None and has_head:
        return ModelTask()
    if stored is None and model.encoder and config.pooling == "auto":
        log.warning("the model's files define no pooling: it is the mean; --pooling changes it")
    stored = stored or (ENCODER_POOLING if model.encoder else DEFAULT_POOLING)
    if config.pooling != "auto":
        stored = replace(stored, kind=config.pooling)
    if stored.kind == "cls" and not model.encoder:
        raise CheckpointError(
            "pooling cls needs an encoder: in this model the first token sees no other token"
        )
    return ModelTask(stored)


def _find_both(config: EngineConfig, checkpoint: Checkpoint, has_head: bool) -> ModelTask:
    """Return the task of a model that generates and embeds (--pool). Raises CheckpointError."""
    if not has_head:
        raise CheckpointError(
            f"--pool {config.pool}: the model has no output head and can only embed"
        )
    stored = _stored_pooling(config, checkpoint) or DEFAULT_POOLING
    return ModelTask(pool=replace(stored, kind=config.pool))


def _stored_pooling(config: EngineConfig, checkpoint: Checkpoint) -> StoredPooling | None:
    try:
        return checkpoint.pooling()
    except CheckpointError as error:
        if config.pooling == "auto" and config.pool == "none":
            raise
        is_pool = config.pooling == "auto"
        option = f"--pool {config.pool}" if is_pool else f"--pooling {config.pooling}"
        log.warning(
            "%s replaces the model's pooling settings, which cannot be used: %s", option, error
        )
        return None


def score_ids(tokenizer_json: bytes) -> tuple[int, int]:
    """Return the token ids of "yes" and "no", whose logits a reranker's score compares. Raises
    CheckpointError if the vocabulary lacks one of them."""
    tokenizer = load_tokenizer(tokenizer_json)
    yes, no = tokenizer.token_to_id(YES), tokenizer.token_to_id(NO)
    if yes is None or no is None:
        raise CheckpointError(
            f"--task score: the vocabulary must have the tokens {YES!r} and {NO!r}"
        )
    return yes, no


def with_separator(model: ModelConfig, tokenizer_json: bytes) -> ModelConfig:
    """Return the config of a model that scores pairs, with the token that ends a pair's first text
    if the model tells its texts apart by it. Raises CheckpointError if no special token ends it."""
    positions = model.positions
    if positions is None or positions.num_types < 2:
        return model
    pair = load_tokenizer(tokenizer_json).encode("a", "b")
    if 1 not in pair.type_ids:
        return model
    last = pair.type_ids.index(1) - 1  # token of the first text
    if last < 0 or not pair.special_tokens_mask[last]:
        raise CheckpointError(
            "tokenizer.json does not frame pairs with special tokens: the model tells a pair's "
            "texts apart by the one after the first text"
        )
    return replace(model, positions=replace(positions, separator=pair.ids[last]))


def check_pairs(tokenizer_json: bytes) -> None:
    """Check that a model that scores pairs has a prompt for them: the tokenizer puts tokens between
    two texts, or has those of Qwen3-Reranker's prompt, without which a model cannot have learned
    that prompt. Raises CheckpointError."""
    tokenizer = load_tokenizer(tokenizer_json)
    owners = tokenizer.encode("a", "b").sequence_ids
    texts = [n for n, owner in enumerate(owners) if owner is not None]
    if texts and texts[-1] - texts[0] >= len(texts):
        return  # tokens of no text are between the two
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    missing = [token for token in PROMPT_TOKENS if token not in added]
    if missing:
        raise CheckpointError(
            "the model cannot score pairs: its tokenizer puts nothing between two texts, and lacks "
            f"tokens of Qwen3-Reranker's prompt: {', '.join(missing)}"
        )


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A model whose files have been found and checked against the options, before its weights are
    loaded."""

    served_name: str
    resolved: Resolved
    backend: Backend
    checkpoint: ViewedCheckpoint
    text: TextFiles
    model: ModelConfig
    task: ModelTask
    score_ids: tuple[int, ...]  # of "yes" and "no", of a reranker that compares their logits
    quantized: Mapping[str, str]  # format by name, of the matrices to quantize


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A loaded model: its decoder with weights, its head that scores if it has one, the backend
    that computes it, and its model card."""

    decoder: ModelDecoder
    head: ScoreHead | None
    backend: Backend
    card: CardData


def prepare_model(config: EngineConfig, progress: Progress) -> PreparedModel:
    """Find or download the model that `config.model` names, and check all of its files and of the
    options that can be checked without loading weights.

    `progress` receives the current activity and its completed fraction, from any thread. Raises
    CheckpointError with a message for the user, and ConfigError.
    """
    if config.device == "auto":
        device = "cpu" if config.kernels == "native" else resolve_device("auto")
        config = replace(config, device=device)
    backend_type = choose(config)  # first, so that errors come before slow work
    resolve_device(config.device)  # raises if a required GPU is missing
    backend = backend_type(config)
    try:
        isq = find_type(config.isq) if config.isq else ""
    except ValueError as error:
        raise ConfigError(f"--isq: {error}") from None
    resolved = resolve(config.model, progress)
    with _path_in_errors(resolved.path):
        opened = under_model(open_checkpoint(resolved.path))
        spec = find_spec(opened.hf_config)
        model = spec.parse(opened.hf_config)
        has_head = model.encoder is None and (
            model.tied_head or HEAD in spec.view(opened, model).names()
        )
        task = find_task(config, opened, model, has_head)
        model = task.of(model)
        requested_len = config.context_len or model.context_len
        model = replace(model, context_len=min(requested_len, model.context_len))
        _check_step(config, model)
        checkpoint = spec.view(opened, model)
        progress("reading the tokenizer", 0.0)
        text = _text_files(checkpoint)
        if model.classifier:
            model = with_separator(model, text.tokenizer_json)
            check_pairs(text.tokenizer_json)
        scored = score_ids(text.tokenizer_json) if task.scores else ()
        unused = {HEAD} if model.tied_head else set()
        check_names(
            checkpoint, tensor_shapes(model), unused | ({HEAD_BIAS} if task.kind else set())
        )
        quantized = isq_formats(isq, model, checkpoint) if isq else {}
    return PreparedModel(
        served_name=config.served_name or resolved.name,
        resolved=resolved,
        backend=backend,
        checkpoint=checkpoint,
        text=text,
        model=model,
        task=task,
        score_ids=scored,
        quantized=quantized,
    )


def _check_step(config: EngineConfig, model: ModelConfig) -> None:
    """Raise ConfigError if --step-tokens is too small for the other options and the model."""
    chunk = model.context_len if model.encoder else max(1, config.chunk_size)
    if 0 < config.step_tokens < config.max_running + chunk:
        reason = (
            f"a step of an encoder computes a whole text of up to {chunk} tokens (--context-len)"
            if model.encoder
            else "a step computes a token of each running sequence and a prefill chunk"
        )
        raise ConfigError(
            f"--step-tokens {config.step_tokens} is less than --max-running {config.max_running} "
            f"+ {chunk}: {reason}"
        )


@contextmanager
def _path_in_errors(path: Path) -> Iterator[None]:
    """Add the path of the model to messages of CheckpointError and UnsupportedModel."""
    try:
        yield
    except (CheckpointError, UnsupportedModel) as error:
        text = str(error)
        raise CheckpointError(text if str(path) in text else f"{path}: {text}") from error


def load_model(config: EngineConfig, progress: Progress) -> LoadedModel:
    """Prepare a model as `prepare_model` does, and load its weights in the format that the options
    demand. Raises the same errors."""
    prepared = prepare_model(config, progress)
    model, checkpoint, quantized = prepared.model, prepared.checkpoint, prepared.quantized
    if config.context_len > model.context_len:
        log.warning(
            "--context-len %d exceeds the model's maximum: it is served with %d tokens",
            config.context_len,
            model.context_len,
        )
    if any(layer.rope and layer.rope.kind in BY_CONTEXT for layer in model.layers):
        log.info("rope is scaled for a context of %d tokens (--context-len)", model.context_len)
    backend = prepared.backend
    with _path_in_errors(prepared.resolved.path):
        expanded = sorted(set(checkpoint.expanded()) - quantized.keys())
        if expanded and backend.weights_format is None:
            log.warning(
                "%d weights are kept as float32: their stored format has no transposed form (%s%s)",
                len(expanded),
                ", ".join(expanded[:3]),
                ", ..." * (len(expanded) > 3),
            )
        cache = DigestCache(part=" without head" if prepared.task.kind else "")
        decoder, head, digest = _load_weights(
            checkpoint, model, backend, quantized, cache, progress
        )
        card = _card(prepared, digest)
    return LoadedModel(decoder, head, backend, card)


def open_checkpoint(path: Path) -> Checkpoint:
    """Open the checkpoint at `path`, a GGUF file or a model directory. Raises CheckpointError."""
    return DirectoryCheckpoint(path) if path.is_dir() else GgufCheckpoint(path, find_mapping)


def find_mapping(arch: str) -> tuple[str, GgufMapping]:
    """Return the architecture's name and its mapping of GGUF tensors, for a value of
    `general.architecture` in a GGUF file. Raises CheckpointError for an unknown value; the message
    lists the known ones."""
    specs = {spec.gguf.arch: spec for spec in known_specs() if spec.gguf}
    if arch not in specs:
        names = ", ".join(sorted(specs))
        raise CheckpointError(f"unknown GGUF architecture {arch!r}; known architectures: {names}")
    spec = specs[arch]
    assert spec.gguf is not None
    return spec.architectures[0], spec.gguf


def _text_files(checkpoint: Checkpoint) -> TextFiles:
    """Return the checkpoint's text files (tokenizer, chat template and the like), from a cache if
    the files have not changed since an earlier start."""
    cache = TextCache()
    text = cache.get(checkpoint.text_paths)
    if text is None:
        text = checkpoint.text_files()
        cache.put(checkpoint.text_paths, text)
    return text


def _load_weights(
    checkpoint: Checkpoint,
    model: ModelConfig,
    backend: Backend,
    quantized: Mapping[str, str],
    cache: DigestCache,
    progress: Progress,
) -> tuple[ModelDecoder, ScoreHead | None, str]:
    """Load the weights into a decoder that `backend` builds, and into the head that scores. Return
    both and the digest of the weights."""
    digest = cache.get(checkpoint.files)
    threads = min(MAX_THREADS, len(os.sched_getaffinity(0)))
    activity = "quantizing weights" if quantized else "loading weights"
    with WeightLoader(
        checkpoint,
        tensor_shapes(model),
        backend.weights_format,
        threads,
        hashed=digest is None,
        copied=backend.copies_weights,
        progress=lambda fraction: progress(activity, fraction),
        quantized=quantized,
    ) as weights:
        decoder = backend.decoder(model, weights)
        head = None
        if model.classifier:
            size = model.hidden_size
            head = ScoreHead(model.classifier, size, lambda name: unpack(weights(name)))
        if digest is None:
            digest = weights.digest()
            cache.put(checkpoint.files, digest)
    if weights.expanded_bytes:
        megabytes = weights.expanded_bytes / 1e6
        log.info("weights expanded to %s: %.0f MB", backend.weights_format, megabytes)
    return decoder, head, quantized_digest(digest, quantized) if quantized else digest


def _card(prepared: PreparedModel, digest: str) -> CardData:
    checkpoint, text, quantized = prepared.checkpoint, prepared.text, prepared.quantized
    model, task = prepared.model, prepared.task
    layouts = {name: checkpoint.layout(name) for name in tensor_shapes(model)}
    layouts |= {name: layouts[name]._replace(format=format) for name, format in quantized.items()}
    stats = [os.stat(file) for file in checkpoint.files]
    return CardData(
        name=prepared.served_name,
        architecture=model.architecture,
        context_len=model.context_len,
        vocab_size=model.vocab_size,
        # A tokenizer may have more ids than the model; those are never generated.
        eos_ids=tuple(i for i in text.eos_ids if i < model.vocab_size),
        bos_id=text.bos_id,
        adds_bos=text.adds_bos,
        tokenizer_json=text.tokenizer_json,
        chat_template=text.chat_template,
        weights_digest=digest,
        quantization=quantization_label(layouts.values()),
        created=int(max(stat.st_mtime for stat in stats)),
        weights_bytes=sum(stat.st_size for stat in stats),
        generation_config=with_recommended(text.generation_config, prepared.resolved.name),
        config_digest=configuration_digest(model, task.kind),
        is_encoder=model.encoder is not None,
        pooling="" if model.classifier else task.kind,
        scores_pairs=model.classifier is not None,
        pool=task.pool.kind if task.pool else "",
        normalizes=any(stored.normalizes for stored in (task.pooling, task.pool) if stored),
        hidden_size=model.hidden_size,
        score_ids=prepared.score_ids,
    )
