"""The table of foreign options: flags, environment variables and configuration keys of vLLM,
SGLang, llama.cpp (llama-server), Ollama, vLLM.rs, candle-vllm and vllm-lite, and what each is in
pdserve.

An exact name takes precedence over a pattern, and an earlier pattern over a later one. Where a name
differs between servers, the table has one meaning or one sentence: `-c` is llama.cpp's context
length if its value is a number, `-t` llama.cpp's threads (vllm-lite's GPUs), `-p` a port, `-q` and
`--quantization` vLLM's, `--ubatch-size` and `--chat-template-kwargs` llama.cpp's. Pure.
"""

from pdserve.cli.foreign import values as of
from pdserve.cli.foreign.entries import Entry, Implied, Lacking, Renamed, Sampling

GPU = (
    "a backend chooses its kernels; --kernels selects a backend, and --enforce-eager turns CUDA "
    "graphs off"
)
SAMPLERS = (
    "pdserve has no such sampler; it has temperature, top_k, top_p, min_p and penalties "
    "(docs/api.md)"
)
MEMORY = "the pool of keys and values takes the free memory; --kv-tokens N sets its size in tokens"
MULTIMODAL = "pdserve serves text; it does not read images, audio or video"
SPECULATION = "speculative decoding is not supported; leave the option out, answers are the same"
ROPE = "the model's files define the scaling of RoPE; change rope_scaling in a copy of config.json"
PLACEMENT = (
    "weights are not split between devices or offloaded; use --device, and a quantized file "
    "(or --isq q4k) for less memory"
)
CORES = "each worker pins its threads to cores; --threads N sets how many it uses"
PROXY = "leave this to a proxy in front of the gateway (docs/security.md)"
METRICS = "/metrics has a fixed set of metrics and buckets (docs/metrics.md)"
HUB_ENV = "huggingface-hub reads this variable"

TABLE: tuple[Entry, ...] = (
    # The model
    Renamed(
        (
            *("--w", "--m", "--f", "--weight-path", "--weight-file", "--model-id"),
            *("-m", "--model-path", "-hf", "-hfr", "--hf-repo", "-hff", "--hf-file"),
            *("VLLM_MODEL",),
        ),
        "--model",
        shown="`--model`; a repository and a file in it are `--model REPO:FILE`",
    ),
    Renamed(("--revision",), "--model", shown="`--model ID@REVISION`"),
    Renamed(
        ("--served-model-name", "-a"),
        "--served-name",
        of.served_names,
        "several",
        "`--served-name`; further names are `--alias`",
    ),
    Renamed(("--isq",), "--isq"),
    Renamed(
        ("--quantization", "-q", "--quant"),
        "--isq",
        of.quantization,
        shown="nothing, as files say how they are quantized; `--isq` for q4k and the like",
    ),
    Renamed(
        ("--dtype",),
        "--weights",
        of.one_of(
            "--weights",
            of.WEIGHTS,
            "weights are computed with as bf16 or float32 (--weights), or as they are stored",
        ),
    ),
    Renamed(
        (
            "--kv-cache-dtype",
            "--kvcache-dtype",
            "-ctk",
            "--cache-type-k",
            "-ctv",
            "--cache-type-v",
            "OLLAMA_KV_CACHE_TYPE",
        ),
        "--kv-dtype",
        of.kv_dtype,
    ),
    Renamed(
        ("--kv-quantization", "VLLM_KV_QUANTIZATION"),
        "--kv-dtype",
        of.bare("--kv-dtype", "int8"),
        "nothing",
        "`--kv-dtype int8`",
    ),
    Renamed(
        ("--runner", "--convert"),
        "--task",
        of.one_of("--task", of.TASKS, "--task is generate, embed or score"),
    ),
    Renamed(("--task",), "--task", of.renamed_or_own("--task", of.TASKS)),
    Renamed(
        ("--is-embedding", "--embedding", "--embeddings"),
        "--task",
        of.bare("--task", "embed"),
        "nothing",
        "`--task embed`",
    ),
    Renamed(
        ("--pooler-config", "--override-pooler-config"),
        "--pooling",
        of.pooler,
    ),
    Renamed(
        ("--rerank", "--reranking"),
        "--task",
        of.bare("--task", "score"),
        "nothing",
        "`--task score`",
    ),
    Renamed(("--device",), "--device", of.own_device),
    Renamed(
        ("--d", "--device-ids", "-dev"),
        "--device",
        of.device,
        shown="`--device`: `cpu`, or `cuda` for 0; CUDA_VISIBLE_DEVICES chooses another GPU",
    ),
    Renamed(("--cpu",), "--device", of.bare("--device", "cpu"), "nothing", "`--device cpu`"),
    Renamed(
        ("-ngl", "--gpu-layers", "--n-gpu-layers"),
        "--device",
        of.gpu_layers,
        shown="`--device`: `cpu` for 0, `auto` for all",
    ),
    # Sizes
    Renamed(
        (
            "--max-model-len",
            "--ctx-size",
            "--context-length",
            "VLLM_MAX_MODEL_LEN",
            "OLLAMA_CONTEXT_LENGTH",
        ),
        "--context-len",
        of.length,
    ),
    Renamed(
        ("-c",),
        "--context-len",
        of.config_or_length,
        shown="`--context-len` for a number, `--config` for a file",
    ),
    Renamed(
        (
            *("--max-num-seqs", "--max-running-requests", "--max-batch-size", "-np", "--parallel"),
            *("VLLM_MAX_BATCH_SIZE", "OLLAMA_NUM_PARALLEL"),
        ),
        "--max-running",
    ),
    Renamed(("--page-size",), "--block-size"),
    Renamed(("--max-total-tokens",), "--kv-tokens"),
    Renamed(
        ("--chunked-prefill-size", "--prefill-chunk-size", "-ub", "--ubatch-size"),
        "--chunk-size",
        of.chunk,
    ),
    Renamed(
        ("--max-num-batched-tokens", "--max-prefill-tokens", "-b", "--batch-size"), "--step-tokens"
    ),
    Renamed(("--max-queued-requests", "--max-num-queued-reqs", "OLLAMA_MAX_QUEUE"), "--max-queued"),
    Renamed(
        (
            *("--no-enable-prefix-caching", "--disable-radix-cache", "--disable-prefix-cache"),
            *("--no-cache-prompt",),
        ),
        "--no-prefix-cache",
        takes="nothing",
    ),
    Renamed(("--disable-cuda-graph",), "--enforce-eager", takes="nothing"),
    Renamed(("-t", "--threads-batch", "-tb"), "--threads"),
    # The HTTP server
    Renamed(("--p", "VLLM_PORT"), "--port"),
    Renamed(("-p",), "--port", of.port),
    Renamed(
        ("--h", "VLLM_HOST", "OLLAMA_HOST"),
        "--host",
        of.host,
        shown="`--host` and `--port`, or `--unix-socket`",
    ),
    Renamed(("--uds",), "--unix-socket"),
    Renamed(("VLLM_API_KEY",), "--api-key"),
    Renamed(("VLLM_API_KEYS_FILE", "--api-keys-file"), "--api-key-file"),
    Renamed(("--ssl-certfile", "--ssl-cert-file"), "--tls-cert"),
    Renamed(("--ssl-keyfile", "--ssl-key-file"), "--tls-key"),
    Renamed(
        ("--allowed-origins", "--cors-origins", "--allow-origins", "OLLAMA_ORIGINS"),
        "--allow-origin",
        of.origins,
        shown="`--allow-origin`, once per origin",
    ),
    Renamed(("--fastapi-root-path", "--api-prefix"), "--root-path"),
    Renamed(("--api-server-count", "-asc"), "--gateway-workers"),
    Renamed(("--tokenizer-worker-num", "--renderer-num-workers"), "--text-processes"),
    Renamed(("--chat-template-file",), "--chat-template"),
    Renamed(
        ("--tool-call-parser", "--enforce-parser"),
        "--tool-parser",
        of.renamed_or_own("--tool-parser", of.TOOL_PARSERS),
    ),
    Renamed(
        ("--reasoning-parser",),
        "--reasoning-parser",
        of.renamed_or_own("--reasoning-parser", of.REASONING_PARSERS),
    ),
    Renamed(("--mcp-servers-config",), "--mcp-config"),
    Renamed(("--shutdown-timeout", "--shutdown-drain-grace-secs"), "--drain-s"),
    Renamed(("--rate-limit-requests",), "--requests-per-minute"),
    # Logs and traces
    Renamed(
        ("--log-level", "VLLM_LOG_LEVEL"),
        "--log-level",
        of.renamed_or_own("--log-level", of.LEVELS),
    ),
    Renamed(
        ("--uvicorn-log-level", "--log-level-http"),
        "--log-level",
        of.one_of("--log-level", of.LEVELS, "--log-level is debug, info, warning or error"),
    ),
    Renamed(
        ("-v", "--verbose", "--log-verbose"),
        "--log-level",
        of.bare("--log-level", "debug"),
        "nothing",
        "`--log-level debug`",
    ),
    Renamed(("-lv", "--verbosity", "--log-verbosity"), "--log-level", of.verbosity),
    Renamed(("OLLAMA_DEBUG",), "--log-level", of.debug, shown="`--log-level debug`"),
    Renamed(
        (
            *("--disable-log-requests", "--no-enable-log-requests", "--disable-log-stats"),
            *("--disable-uvicorn-access-log", "--log-disable"),
        ),
        "--log-level",
        of.bare("--log-level", "warning"),
        "nothing",
        "`--log-level warning`",
    ),
    Renamed(
        ("--log-jsonl",),
        "--log-format",
        of.bare("--log-format", "json"),
        "nothing",
        "`--log-format json`",
    ),
    Renamed(("--otlp-endpoint", "VLLM_OTLP_ENDPOINT"), "--otlp-traces-endpoint"),
    # Prefill and decode in separate processes
    Implied(("--pd-server",), "`pdserve prefill` is the PD server", commands=("prefill",)),
    Implied(("--pd-client",), "`pdserve decode` is the PD client", commands=("decode",)),
    Lacking(
        ("--pd-server",),
        "`pdserve up` starts prefill and decode workers; to start only prefill workers, use "
        "`pdserve prefill --routers HOST:PORT`",
    ),
    Lacking(
        ("--pd-client",),
        "`pdserve up` starts prefill and decode workers; to start only decode workers, use "
        "`pdserve decode --routers HOST:PORT`",
    ),
    Renamed(("--pd-url",), "--routers", of.pd_url, commands=("prefill", "decode")),
    Lacking(
        ("--pd-url",),
        "`pdserve up` connects its workers itself; use this option with `pdserve prefill` and "
        "`pdserve decode`, for the router's address",
    ),
    Implied(("--disaggregation-mode",), "the command is the mode", "value", ("prefill", "decode")),
    Renamed(
        ("--disaggregation-mode",),
        "--prefill",
        of.disaggregation,
        shown="`pdserve prefill` or `pdserve decode`; `--prefill 0` for null",
    ),
    Lacking(
        (
            "--disaggregation-*",
            "--kv-transfer-config",
            "--optimistic-prefill-attempts",
            "--encoder-*",
            "--language-only",
            "--num-reserved-decode-tokens",
            "--enable-pd*",
            "--pdmux*",
            "--kv-events-config",
            "--gated-launch-port",
            "--tokens-only",
            "--ec-*",
            "--engine-info-bootstrap-port",
            "--enable-scale-out",
        ),
        "`pdserve prefill` and `pdserve decode` hand keys and values over themselves; "
        "--kv-transport chooses the way, and --routers connects them",
    ),
    # Conversations instead of a server
    Implied(("--i", "--interactive"), "`pdserve run` is a conversation", commands=("run",)),
    Lacking(("--i", "--interactive"), "for a conversation, use `pdserve run`"),
    Lacking(
        ("--prompts", "--prompt"),
        "for answers without a server that stays, use `pdserve run MODEL --prompts 'A | B'`",
    ),
    Lacking(
        ("--batch",),
        "to measure N equal requests at once, run `pdserve bench --concurrency N` against a server",
    ),
    # Defaults of requests
    Sampling(("--temp", "--temperature"), "temperature", float),
    Sampling(("--top-k",), "top_k", int),
    Sampling(("--top-p",), "top_p", float),
    Sampling(("--min-p",), "min_p", float),
    Sampling(("--penalty", "--repeat-penalty"), "repetition_penalty", float),
    Sampling(("--max-tokens", "-n", "--predict", "--n-predict"), "max_tokens", int, -1),
    Renamed(("--preferred-sampling-params",), "--override-generation-config"),
    Renamed(
        ("--sampling-defaults",),
        "--generation-config",
        of.one_of(
            "--generation-config",
            {"model": "auto", "openai": "vllm"},
            "use model or openai",
        ),
        shown="`--generation-config`: `auto` for model, `vllm` for openai",
    ),
    Renamed(
        ("--disable-reasoning",),
        "--thinking",
        of.bare("--thinking", "off"),
        "nothing",
        "`--thinking off`",
    ),
    Renamed(
        ("--reasoning", "-rea", "--think"),
        "--thinking",
        of.one_of("--thinking", of.THINKING, of.TEMPLATE_VARIABLES),
        "optional",
    ),
    Renamed(
        ("--chat-template-kwargs", "--default-chat-template-kwargs"),
        "--thinking",
        of.template_variables,
        shown="`--thinking` for enable_thinking; others are fields of a request",
    ),
    # What pdserve does anyway
    Implied(("--server", "--headless"), "`pdserve up` is a server"),
    Implied(
        (
            *(
                "--enable-prefix-caching",
                "--cache-prompt",
                "--context-cache",
                "--enable-chunked-prefill",
            ),
            *("--prefix-cache", "-cb", "--cont-batching", "--async-scheduling"),
            *("--enable-mixed-chunk", "--kv-unified", "-kvu", "--enable-deterministic-inference"),
        ),
        "prefix caching, chunked prefill and continuous batching are on",
    ),
    Implied(("-fa", "--flash-attn", "OLLAMA_FLASH_ATTENTION"), "attention is tiled", "optional"),
    Implied(
        (
            *("--enable-auto-tool-choice", "--jinja", "--no-mmproj"),
            *("--trust-remote-code", "--no-trust-remote-code"),
        ),
        "tool calls are read and templates rendered; code in a model's files never runs",
    ),
    Implied(
        (
            "--metrics",
            "--enable-metrics",
            "--enable-trace",
            "--log",
            "--log-requests",
            "--enable-log-requests",
            "--enable-request-id-headers",
            "--enable-force-include-usage",
            "--enable-prompt-tokens-details",
            "--enable-cache-report",
            "--log-timestamps",
            "--log-prefix",
            "--enable-metrics-for-all-schedulers",
        ),
        "/metrics, request logs, request ids and cached tokens in usage are on",
    ),
    Implied(("--ui-server", "--ui", "--webui"), "the chat page is at /"),
    Implied(("--multi-process", "--multithread"), "each worker is a process"),
    Implied(("--grpc", "--grpc-mode", "--smg-grpc-mode"), "gRPC is served, see --grpc-port"),
    Implied(
        (
            "CUDA_VISIBLE_DEVICES",
            "HF_HUB_CACHE",
            "HF_TOKEN",
            "HTTP_PROXY",
            "HTTPS_PROXY",
            "NO_PROXY",
            "http_proxy",
            "https_proxy",
            "no_proxy",
        ),
        "these variables are read, by CUDA, huggingface-hub and the HTTP client",
        "value",
    ),
    # Several devices
    Renamed(
        (
            *("--tensor-parallel-size", "-tp", "--tp-size", "--tp", "--pipeline-parallel-size"),
            *("-pp", "--pp-size", "--expert-parallel-size", "--ep-size", "--ep"),
            *("--num-nodes", "--nnodes", "VLLM_TENSOR_PARALLEL_SIZE"),
            *("--decode-context-parallel-size", "-dcp", "--dcp-size"),
            *("--prefill-context-parallel-size", "-pcp"),
        ),
        "",
        of.one_device,
        shown="nothing for 1; a worker uses one device, so start several workers for more",
    ),
    Renamed(
        ("--data-parallel-size", "-dp", "--dp-size", "--dp"),
        "--decode",
        of.replicas,
        shown="nothing for 1; `--decode N` on a CPU, or one worker per GPU",
    ),
    Lacking(
        (
            *("--data-parallel-*", "-dp?", "--dp-*", "--attn-cp-size", "--attn-dp-size"),
            *("--attention-context-parallel-size", "--attention-data-parallel-size"),
            *(
                "--distributed-*",
                "--dist-*",
                "--cpu-distributed-*",
                "--master-addr",
                "--master-port",
                "--node-rank",
                "-r",
            ),
            *("--node-*", "--all2all-backend", "--enable-expert-parallel", "-ep", "--enable-eplb"),
            *("--enable-ep-*", "--eplb-*", "--elastic-ep*", "--enable-elastic-*", "--max-ep-size"),
            *("--ep-*", "--expert-placement-strategy", "--moe-a2a-backend", "--moe-dp-size"),
            *("--moe-data-parallel-size", "--moe-dense-tp-size", "--deepep-*", "--nccl-*"),
            *("--enable-nccl-*", "--enable-dp-*", "--enable-dbo", "--dbo-*", "--dcp-*", "--cp-*"),
            *("--disable-custom-all-reduce", "--disable-nccl-*", "--enable-p2p-check"),
            *(
                "--ray-*",
                "--use-ray",
                "--base-gpu-id",
                "--gpu-id-step",
                "--pp-*",
                "--pre-warm-nccl",
            ),
            *("--enable-prefill-cp", "--enable-cp-*", "--enable-mscclpp", "--enable-symm-mem"),
            *("--enable-torch-symm-mem", "--load-balance-method", "--mooncake-ib-device"),
            *("--enable-quant-communications", "--enable-*allreduce-fusion", "--tbo-*"),
            *("--disable-*allreduce-fusion*", "--enforce-disable-flashinfer-allreduce-fusion"),
            *("--flashinfer-allreduce-*", "--enable-two-batch-overlap"),
            *("--enable-single-batch-overlap", "--enable-tp-*", "--enable-attn-tp-*"),
            *("--disable-attn-tp-*", "--enable-*-tp", "--enable-hc-sp", "--enable-layernorm-sp"),
            *("--enable-batch-sharded-sampling", "--enable-broadcast-*", "--init-expert-location"),
            *("--disable-flashinfer-cutlass-moe-*", "--enable-fault-tolerance"),
            *("--fault-tolerance-config", "--dwdp-size", "--expert-distribution-*"),
            *("--expert-balancedness-*", "--aggregate-engine-logging", "--boundary-reduction"),
            *("--enable-kv-cache-sharding", "--shared-experts-tp-size", "--sm-group-num"),
            *("-sm", "--split-mode", "-ts", "--tensor-split", "-mg", "--main-gpu", "--rpc"),
            *("OLLAMA_SCHED_SPREAD", "--multi-node", "--enable-waterfill"),
        ),
        of.SEVERAL_GPUS,
    ),
    # Topics without an equivalent
    Lacking(
        ("--fp8-kvcache",),
        "an fp8 KV cache is not supported; the closest option is --kv-dtype int8",
    ),
    Lacking(
        (
            *(
                "--spec-*",
                "--speculative-*",
                "--num-speculative-tokens",
                "--enable-adaptive-speculative",
                "--draft*",
            ),
            *("--max-draft-tokens", "VLLM_SPECULATIVE_*", "VLLM_MAX_DRAFT_TOKENS", "--decoupled-*"),
            *(
                "VLLM_ADAPTIVE_SPECULATIVE",
                "--enable-multi-layer-eagle",
                "--*-draft",
                "-md",
                "-hfd",
            ),
            *("-hfrd", "-ngld", "-devd", "-td", "-tbd", "-ctkd", "-ctvd", "-cd", "-otd", "-cmoed"),
            *("-ncmoed", "-Cd", "-Crd", "-Cbd", "-Crbd", "-lcs", "-lcd", "--lookup-cache-*", "-sc"),
            *("--per-request-spec-*", "--enable-draft-*", "--decrypted-draft-*", "--hf-repo-draft"),
            *("--fim-qwen-7b-spec", "--fim-qwen-14b-spec", "--dllm-*", "--diffusion-config"),
            *("--draft-specs", "-dc"),
        ),
        SPECULATION,
    ),
    Lacking(
        (
            *("--*lora*", "--enable-prompt-adapter", "--max-prompt-adapter*", "--control-vector*"),
            *("--prompt-adapters", "--qlora-*"),
        ),
        "adapters are not supported; merge them into the weights and serve the merged model",
    ),
    Lacking(
        (
            *("--mm-*", "--limit-mm-*", "--mmproj*", "--no-mmproj-*", "-mm", "-mmu", "-mmdev"),
            *("--*-mm-*", "--media-*", "--allowed-media-domains", "--allowed-local-media-path"),
            *("--image-*", "--video-*", "--interleave-mm-strings", "--mtmd-*", "--skip-mm-*"),
            *("--enable-multimodal", "--disable-fast-image-processor", "--asr-*"),
            *("--enable-adaptive-dispatch-to-encoder", "--language-model-only", "--io-processor-*"),
            *("--enable-tower-connector-lora", "--enable-precise-embedding-interpolation"),
            *("--vision-*", "--enable-flash-late-interaction", "--dimensions"),
        ),
        MULTIMODAL,
    ),
    Lacking(
        ("--rope-*", "--yarn-*"),
        ROPE,
    ),
    Lacking(
        (
            "--hf-overrides",
            "--hf-config-path",
            "--json-model-override-args",
            "--override-kv",
            "--config-format",
            "--model-config-parser",
            "--model-class-overrides",
            "--decrypted-config-file",
            "--embd-normalize",
        ),
        "the model's own files define it; change config.json in a copy of the model",
    ),
    Lacking(
        (
            "--tokenizer",
            "--tokenizer-path",
            "--tokenizer-revision",
            "--tokenizer-mode",
            "--tokenizer-backend",
            "--code-revision",
            "--spm-infill",
            "--skip-tokenizer-init",
        ),
        "the tokenizer is that in the model's files; put another one into a copy of the model",
    ),
    Lacking(
        ("--download-dir", "OLLAMA_MODELS", "--models-dir"),
        "models are in the cache of huggingface-hub, whose folder is HF_HUB_CACHE",
    ),
    Lacking(
        ("--hf-token", "-hft", "--hf-token-path"),
        "set HF_TOKEN or HF_TOKEN_PATH, because other users of the machine can see arguments",
    ),
    Lacking(("--offline",), "set HF_HUB_OFFLINE=1"),
    Lacking(
        ("--model-url", "-mu", "--docker-repo", "-dr", "--insecure", "OLLAMA_REMOTES"),
        "models come from the Hugging Face hub (--model org/name:Q4_K_M) or from a path",
    ),
    Lacking(
        (
            *("--load-format", "--model-loader-extra-config", "--load-mode", "-lm", "--lazy-mode"),
            *("-lzm", "--mlock", "--no-mmap", "--mmap", "--safetensors-*", "--pt-load-*"),
            *("--weight-loader-*", "--weight-cache-*", "--custom-weight-loader", "--check-tensors"),
            *("--ignore-patterns", "--model-impl", "--max-parallel-loading-workers"),
            *("--use-tqdm-on-load", "--remote-instance-*", "--startup-weight-load-mode"),
            *("--delete-ckpt-after-loading", "--checkpoint-engine-*", "--model-checksum"),
            *("--weight-version", "--weight-transfer-config", "--modelexpress-config", "--repack"),
            *("--no-repack", "-nr", "--allow-stub", "VLLM_ALLOW_STUB", "OLLAMA_LOAD_TIMEOUT"),
            *("--allow-deprecated-quantization", "--quantization-*", "--quantize-and-serve"),
            *("--modelopt-*", "--rl-*", "OLLAMA_MAX_TRANSFER_STREAMS", "--kt-*"),
        ),
        "the format of files is detected, and pdserve chooses how to read them; leave it out",
    ),
    Lacking(
        (
            *("--gpu-memory-utilization", "--device-memory-utilization", "--mem-fraction-static"),
            *("--kv-fraction", "--mem", "--kvcache-mem-gpu", "--kv-cache-memory-bytes"),
            *("--num-gpu-blocks-override", "--kv-blocks", "--num-kv-blocks", "VLLM_KV_BLOCKS"),
            *("--prefix-cache-max-tokens", "--cache-ram", "-cram", "OLLAMA_GPU_OVERHEAD", "-fit"),
            *("--fit", "-fitt", "--fit-target", "-fitc", "--fit-ctx", "LLAMA_ARG_FIT"),
            *("LLAMA_ARG_FIT_TARGET", "--vram-budget-bytes", "--watermark", "--enable-watermark"),
            *("--swa-full-tokens-ratio", "OLLAMA_MAX_VRAM"),
            *("--max-num-active-seqs", "--enable-unified-memory", "--enable-memory-saver"),
        ),
        MEMORY,
    ),
    Lacking(
        (
            *("--swap-space", "--cpu-offload-*", "--kv-offloading-*", "--kvcache-mem-cpu"),
            *("--cpu-mem-fold", "--enable-hicache", "--hicache-*", "--enable-hierarchical-cache"),
            *("--enable-lmcache", "--lmcache-*", "--enable-flexkv", "--flexkv-*", "-nkvo", "-kvo"),
            *("--kv-offload", "--no-kv-offload", "--radix-cache-backend", "--unified-cache-*"),
            *("--enable-unified-cache-*", "--slot-save-path", "--enable-hisparse", "--hisparse-*"),
            *("--hierarchical-sparse-*",),
        ),
        "keys and values stay in the memory of the device; --kv-dtype int8 halves them on the CPU",
    ),
    Lacking(
        (
            *("--offload-*", "--n-cpu-*", "--cpu-moe*", "-cmoe", "-ncmoe", "-ncffn", "-ot"),
            *(
                "--override-tensor",
                "--op-offload",
                "--no-op-offload",
                "--no-host",
                "--ple-offload-*",
            ),
            *("--enable-paged-experts", "--paged-experts-*", "--list-devices", "--moe-cache-mib"),
            *("--enable-weights-cpu-backup", "OLLAMA_LLM_LIBRARY", "OLLAMA_VULKAN"),
            *("OLLAMA_IGPU_ENABLE", "GGML_VK_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"),
            *("HIP_VISIBLE_DEVICES", "HSA_OVERRIDE_GFX_VERSION", "ROCR_VISIBLE_DEVICES"),
            *("OLLAMA_INTEL_GPU", "OLLAMA_LIBRARY_PATH", "MTMD_BACKEND_DEVICE"),
        ),
        PLACEMENT,
    ),
    Lacking(
        (
            *(
                "--mamba-*",
                "--enable-mamba-*",
                "--max-mamba-*",
                "--gdn-*",
                "--kda-*",
                "--linear-attn-*",
            ),
            *("--enable-linear-*", "--linear-replayssm-*", "--use-replayssm", "--replayssm-*"),
            *("--int8-mamba-*", "--enable-int8-mamba-*", "--engram-config"),
        ),
        "models with state-space or linear attention layers are not supported (docs/models.md)",
    ),
    Lacking(
        (
            *(
                "--numa*",
                "--cpu-mask*",
                "--cpu-range*",
                "--cpu-strict*",
                "--prio",
                "--prio-batch",
                "--poll*",
            ),
            *("-C", "-Cr", "-Cb", "-Crb", "--threads-http", "MAP_NUMA_NODE"),
        ),
        CORES,
    ),
    Lacking(
        (
            *("--samplers", "--sampler-seq", "--sampling-seq", "--dry-*", "--xtc-*", "--typical*"),
            *("--top-n-sigma", "--top-nsigma", "--mirostat*", "--dynatemp-*", "--adaptive-*"),
            *("--repeat-last-n", "--backend-sampling", "-bs", "--sampling-backend"),
            *("--logits-processor*", "--enable-custom-logit-processor", "--use-fp64-gumbel"),
            *("--mlx-enable-sampling", "--watermark-config", "--sampling-mask-*"),
            *("--return-sampling-mask", "--special", "-sp"),
        ),
        SAMPLERS,
    ),
    Lacking(
        ("--seed", "-s", "--random-seed"),
        "the seed is a field of a request (seed); without one, each answer has a random seed",
    ),
    Lacking(
        ("--presence-penalty", "--frequency-penalty"),
        "the field of a request of this name sets it; there is no default of the server",
    ),
    Lacking(
        ("--grammar", "--grammar-file", "--json-schema*", "-j", "-jf", "--format"),
        "a request sets the form of its answer: response_format or structured_outputs",
    ),
    Lacking(
        (
            "--logit-bias",
            "-l",
            "--ignore-eos",
            "--reverse-prompt",
            "--keep",
            "--max-logprobs",
            "--logprobs-mode",
            "--return-tokens-as-token-ids",
            "--response-role",
            "--truncate",
        ),
        "a request sets this; the server has no default (docs/api.md)",
    ),
    Lacking(
        (
            *("--reasoning-budget*", "--reasoning-effort"),
            *("--anthropic-disabled-thinking-effort", "--reasoning-preserve", "--hidethinking"),
            *("--no-reasoning-preserve", "--enable-strict-thinking", "--strip-thinking-cache"),
            *("--reasoning-config", "--thinking-*"),
        ),
        of.TEMPLATE_VARIABLES,
    ),
    Lacking(
        (
            "--reasoning-format",
            "--reasoning-parser-plugin",
            "--skip-chat-parsing",
            "--no-skip-chat-parsing",
        ),
        "reasoning is found by the chat template and sent as reasoning_content; --reasoning-parser "
        "chooses its format, none turns it off",
    ),
    Lacking(
        (
            "--tool-parser-plugin",
            "--tool-server",
            "--tool-strict-level",
            "--tool-prompt",
            "--exclude-tools-when-tool-choice-none",
            "--sidecar*",
        ),
        "the format of tool calls is found by the chat template; --tool-parser chooses another, "
        "and --mcp-config adds tools of MCP servers",
    ),
    Lacking(
        (
            "--mcp-command",
            "--mcp-args",
            "--mcp-servers-json",
            "--tools",
            "--tools-runtime",
            "--agent",
            "--no-agent",
            "-ag",
            "-no-ag",
            "--ui-mcp-proxy",
            "--no-ui-mcp-proxy",
            "--webui-mcp-proxy",
            "--no-webui-mcp-proxy",
        ),
        "list MCP servers in a JSON file and pass it with --mcp-config (docs/mcp.md)",
    ),
    Lacking(
        (
            "--no-jinja",
            "--completion-template",
            "--chat-template-content-format",
            "--hf-chat-template-name",
            "--trust-request-chat-template",
            "--prefill-assistant",
            "--no-prefill-assistant",
        ),
        "the chat template of the model is rendered; --chat-template FILE replaces it",
    ),
    Lacking(
        (
            "--guided-decoding-*",
            "--grammar-backend",
            "--structured-outputs-config",
            "--constrained-json-*",
            "--disable-outlines-disk-cache",
            "VLLM_LLG_*",
        ),
        "llguidance compiles all grammars and schemas; leave the option out",
    ),
    Lacking(
        (
            *(
                "--no-cont-batching",
                "-nocb",
                "--no-kv-unified",
                "-no-kvu",
                "--no-enable-chunked-prefill",
            ),
            *("--holding-time", "--num-scheduler-steps", "--num-continuous-decode-steps"),
            *("--schedul*", "--max-waiting-batches", "VLLM_MAX_WAITING_BATCHES"),
            *("--max-num-queued-tokens", "--max-num-scheduled-tokens"),
            *("--long-prefill-*", "--enable-priority-scheduling", "--priority-*", "--retraction-*"),
            *("--abort-on-priority-*", "--disable-priority-*", "--default-priority-value"),
            *("--disable-overlap-schedule", "--enable-dynamic-chunking"),
            *(
                "--prefill-delayer-*",
                "--prefill-decode-interval*",
                "--prefill-kv-cache-dequant-dtype",
            ),
            *("--prefill-max-requests", "--prefill-only-*", "--prefill-schedule-interval"),
            *("--enable-prefill-*", "--stream-interval", "--min-free-slots-delay"),
            *(
                "--disable-chunked-*",
                "--disable-cascade-attn",
                "--ubatch-size-*",
                "VLLM_SEQ_PACKING_*",
            ),
            *("--engine-mailbox-capacity", "--performance-mode", "--batch-notify-size"),
            *("--defrag-thold", "-dt", "--context-shift", "--no-context-shift", "--swa-*"),
            *("--ctx-checkpoints", "-ctxcp", "-cms", "--checkpoint-min-step", "--cache-reuse"),
            *("--cache-idle-slots", "--no-cache-idle-slots", "--slot-prompt-similarity", "-sps"),
            *("--kv-unified-per-slot", "--radix-eviction-*", "--disable-sliding-window"),
            *(
                "--prefix-cache-retention-interval",
                "--prefix-caching-hash-algo",
                "--prefix-match-unit",
            ),
            *("--disable-hybrid-*", "--enable-session-radix-cache", "--enable-streaming-session"),
            *("--c128-page-size", "--enable-*-swa-bounded-replay"),
            *("--enable-page-major-kv-layout", "--sleep-on-idle", "--enable-shm-tensor-arena"),
            *("--kv-sharing-*", "--incremental-streaming-output", "--dp-sync-interval", "--swap-*"),
            *("--disable-tokenizer-batch-*", "--enable-tokenizer-batch-*", "--dynamic-batch-*"),
            *("--enable-dynamic-batch-*", "--detokenizer-worker-num", "--additional-config"),
            *("--enable-mis", "--gc-*"),
        ),
        "the scheduler has few options: --max-running, --chunk-size, --step-tokens, --max-waiting "
        "and --kv-tokens",
    ),
    Lacking(
        (
            *(
                "--attention-*",
                "--moe-backend",
                "--moe-runner-backend",
                "--*-attention-backend",
                "--*-attn-backend",
                "--*-gemm-backend",
            ),
            *(
                "--*-backend",
                "--attn-*",
                "--cuda-graph-*",
                "--disable-*cuda-graph*",
                "--cudagraph-*",
            ),
            *("--max-cudagraph-*", "--max-seq-len-to-capture", "--compilation-config", "-cc", "-O"),
            *("-ac", "--optimization-level", "--enable-torch-compile*", "--torch-compile-*"),
            *("--triton-*", "--flashinfer-*", "--enable-flashinfer-*", "--disable-flashinfer-*"),
            *("--kernel-config", "--ir-op-priority", "--enable-fused-*", "--enable-fp32-lm-head"),
            *("--enable-tf32-matmul", "--enable-lean-attention", "--dsa-*", "--dsv4-*", "--nsa-*"),
            *("--enable-dsa-*", "--disable-shared-experts-fusion", "--enforce-shared-*"),
            *(
                "--enable-*megakernel",
                "--enable-amd-monokernel",
                "--enable-*megamoe*",
                "--fuseep-mode",
            ),
            *("--enable-cudagraph-gc", "--debug-cuda-graph", "--enable-profile-cuda-graph"),
            *(
                "--enable-deepseek-v4-*",
                "--enable-linker-*",
                "--enable-scattered-*",
                "--calculate-kv-*",
            ),
            *("--qsa-*", "--enable-aiter-*", "--enable-shared-experts-*", "VLLM_CUDA_GRAPH_*"),
            *("--jit-monitor-*", "--enable-cumem-allocator", "--swa-full", "--kv-canary*"),
            *("--enable-encoder-*", "--enable-decoder-*", "SM90_*"),
        ),
        GPU,
    ),
    Lacking(
        (
            *("--enable-sleep-mode", "--sleep-*", "--keepalive", "OLLAMA_KEEP_ALIVE", "--models-*"),
            *("--no-models-autoload", "OLLAMA_MAX_LOADED_MODELS", "OLLAMA_NOPRUNE"),
        ),
        "models stay loaded until the server stops; several --model are served side by side",
    ),
    Lacking(
        (
            "--ssl-*",
            "--enable-ssl-refresh",
            "--http2-*",
            "--enable-http2",
            "--h11-*",
            "--allowed-methods",
            "--allowed-headers",
            "--allow-credentials",
            "--cors-*",
            "--no-cors-credentials",
            "--allow-methods",
            "--allow-headers",
            "--middleware",
            "--reuse-port",
            "--enable-http-worker-reuseport",
        ),
        PROXY,
    ),
    Lacking(
        (
            "--timeout",
            "-to",
            "--sse-*",
            "KEEP_ALIVE_INTERVAL",
            "CLAUDE_*",
            "--watchdog-timeout",
            "--soft-watchdog-timeout",
            "--grpc-response-timeout-secs",
            "VLLM_RS_TOOL_BUFFER_*",
            "CANDLE_VLLM_SSE_BUFFER_SIZE",
        ),
        "--request-timeout-s limits a request, and --stall-timeout-s a client that stops reading",
    ),
    Lacking(
        (
            "--api-keys*",
            "--rate-limit-*",
            "--insecure-allow-public-no-auth",
            "VLLM_INSECURE_ALLOW_PUBLIC_NO_AUTH",
            "OLLAMA_AUTH",
        ),
        "--api-key and --api-key-file list the keys, --requests-per-minute limits each of them "
        "(docs/security.md)",
    ),
    Lacking(
        (
            "--disable-fastapi-docs",
            "--enable-offline-docs",
            "--enable-tokenizer-info-endpoint",
            "--props",
            "--slots",
            "--no-slots",
            "--path",
            "--media-path",
            "--file-storage-path",
            "--enable-response-store",
            "--no-ui",
            "--no-webui",
            "--ui-config*",
            "--webui-config*",
            "--tags",
            "--enable-server-load-tracking",
            "--fingerprint-*",
            "--cohere-*",
            "--grpc-http-sidecar-port",
            "--smg-http-sidecar-port",
        ),
        "the gateway's endpoints and pages are fixed (docs/api.md)",
    ),
    Lacking(
        ("--warmup", "--no-warmup", "--warmups", "--skip-server-warmup", "--fail-on-environ-*"),
        "a worker measures its speed when it starts; --chunk-size N makes this shorter",
    ),
    Lacking(
        (
            *("--log-file", "--log-dir", "VLLM_LOG_DIR", "--log-config-file", "--logging-config"),
            *("--log-requests-*", "--enable-log-*", "--max-log-len", "--log-error-stack"),
            *("--log-colors", "--no-log-*", "--disable-access-log-*", "--crash-dump-folder"),
            *(
                "--decode-log-interval",
                "--show-time-cost",
                "--enable-request-time-*",
                "--log-prompts-dir",
            ),
            *("--uvicorn-access-log-*", "--enable-logging-*", "VLLM_RS_CHAT_LOGGER", "RUST_LOG"),
            *("CANDLE_VLLM_CHAT_LOGGER", "OLLAMA_DEBUG_LOG_REQUESTS", "--record-conversation"),
            *("--nowordwrap", "OLLAMA_NOHISTORY", "--perf", "--no-perf"),
        ),
        "logs go to standard error, without prompts and answers; --log-level and --log-format set "
        "their form",
    ),
    Lacking(
        (
            *("--bucket-*", "--*-buckets", "--custom-histogram-buckets", "--tokenizer-metrics-*"),
            *(
                "--extra-metric-labels",
                "--enable-mfu-metrics",
                "--kv-cache-metrics*",
                "--context-bucket",
            ),
            *("--show-hidden-metrics-*", "--export-metrics-*", "--enable-forward-pass-metrics"),
            *("--forward-pass-metrics-*", "--enable-per-request-metrics", "--cudagraph-metrics"),
            *("--load-publish-endpoint", "--load-snapshot-*"),
        ),
        METRICS,
    ),
    Lacking(
        (
            *("--collect-detailed-traces", "--trace-modules", "--otlp-service-name", "--profil*"),
            *(
                "--enable-layerwise-*",
                "--debug-tensor-*",
                "--msprobe-*",
                "--forward-hooks",
                "--otlp",
            ),
            *("--enable-trace-*", "--spec-trace-dir"),
        ),
        "traces go to --otlp-traces-endpoint, and hand-offs to --trace-dir (docs/tracing.md)",
    ),
    Lacking(
        (
            *(
                "--worker-cls",
                "--worker-extension-cls",
                "--gated-*",
                "--return-*",
                "--aux-output-*",
            ),
            *(
                "--enable-return-*",
                "--enable-prompt-embeds",
                "--kv-cache-dtype-skip-layers",
                "--allow-auto-truncate",
            ),
            *("--stream-response-default-include-usage", "--trust-mm-*", "--sparse-indexer-*"),
            *("--enable-adaptive-*", "--trust-request-*", "--use-*", "--enable-w4a4-*"),
        ),
        "pdserve has no equivalent; leave the option out",
    ),
    Lacking(
        (
            "-e",
            "--escape",
            "--no-escape",
            "--completion-bash",
            "--cache-list",
            "-cl",
            "--usage",
            "--experimental",
        ),
        "an option of llama.cpp's or Ollama's own command line; `pdserve ls` lists models in the "
        "cache, and `pdserve up --help` the options",
    ),
    Lacking(
        ("--embd-gemma-default", "--fim-qwen-*", "--gpt-oss-*"),
        "name the model: --model org/name-GGUF:Q4_K_M",
    ),
    Lacking(
        ("LLAMA_ARG_*", "LLAMA_API_KEY"),
        "pdserve does not read variables of llama-server; use its flag (LLAMA_ARG_CTX_SIZE is "
        "--ctx-size)",
    ),
    Lacking(
        ("VLLM_RS_STRICT_TOOL_CALL", "CANDLE_VLLM_STRICT_TOOL_CALL"),
        "strict in a request's tool constrains its arguments to their schema",
    ),
    Lacking(
        (
            "OLLAMA_GO_TEMPLATE",
            "OLLAMA_EDITOR",
            "OLLAMA_NO_CLOUD",
            "OLLAMA_TMPDIR",
            "OLLAMA_RUNNERS_DIR",
        ),
        "pdserve has neither Modelfiles nor cloud models; it needs no equivalent",
    ),
    Lacking(
        ("server", "engine", "auth", "cors", "observability"),
        "keys of pdserve are not nested in sections",
    ),
    Lacking(("VLLM_CONFIG_PATH",), "set PDSERVE_CONFIG, or pass --config FILE"),
)
# Commands of other servers: pdserve's, or the sentence that says what to use
COMMANDS = {"serve": "up", "list": "ls"}
NO_COMMANDS = {
    "create": "there are no Modelfiles: pass the options to `pdserve up`, such as --chat-template",
    "show": "`pdserve models` shows what a server serves, `pdserve ls` what is in the cache",
    "stop": "press Ctrl-C at the server, or send SIGTERM to the process that `pdserve ps` shows",
    "push": "use `hf upload`, the command of huggingface-hub",
    "cp": "pass --served-name NAME to `pdserve up` to serve a model under another name",
    "signin": "use `hf auth login`, the command of huggingface-hub",
    "signout": "use `hf auth logout`, the command of huggingface-hub",
    "login": "use `hf auth login`, the command of huggingface-hub",
    "logout": "use `hf auth logout`, the command of huggingface-hub",
    "launch": "`pdserve up` starts a server",
    "launch_server": "`pdserve up` starts a server",
    "collect-env": "`pdserve report` collects what a bug report needs",
    "run-batch": "`pdserve complete IN OUT` runs a file of requests",
}
# Words after a model that candle-vllm took for its architecture
ARCHITECTURES = (
    *("llama", "llama3", "mistral", "phi2", "phi3", "phi4", "qwen2", "qwen3", "qwen3moe", "gemma"),
    *("gemma3", "yi", "stable-lm", "stablelm", "glm4", "deep-seek", "deepseek"),
)
