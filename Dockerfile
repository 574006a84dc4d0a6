# Two images: `control` (gateway, router and what watches them) and `worker` (prefill and decode, with
# the model that ships). Neither has torch, pip or a compiler. What pip installs, also to build, comes
# from docker/*.txt with its hashes; `make lock` writes those files, and `make pin` the digest below.
# Debian's packages of the stage that builds are those of the day. What is inside an image is in
# /opt/pdserve: sbom.json has the Python packages, sbom-debian.json Debian's and Python.
# Sizes are tested on a Debian that debootstrap makes (tests/compose), not on the base below.
#
# CONTROL_EXTRAS: "redis postgres trace" or some of them, in both images. WORKER_EXTRAS: extras of
# pyproject.toml in the worker image, without hashes: "torch" adds the reference kernels; "torch cuda" is
# for GPUs and needs WORKER_PACKAGES="gcc libc6-dev", since Triton compiles a few lines of C when a
# worker starts. TORCH_INDEX: an extra package index for torch, e.g. one with its CPU build.
# COMMIT: whose sources these are, --build-arg COMMIT=$(git rev-parse HEAD), for the label and for
# pdserve_build_info, by which an alert sees builds side by side; without one that has a digest of the
# sources. VERSION: of pyproject.toml, for the label.
# BUILD_IMAGE: a Python with its headers, of the same version, which builds.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm@sha256:a36c24f9cbdf4fd0f52d67f0823eeac19c2028c637cecc392d97f980d4fec56b
ARG BUILD_IMAGE=${PYTHON_IMAGE}

FROM ${BUILD_IMAGE} AS build
ENV PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends g++ binutils \
    && rm -rf /var/lib/apt/lists/*

FROM build AS wheel
WORKDIR /src
COPY docker/build.txt /tmp/
RUN python3 -m venv /tmp/build \
    && /tmp/build/bin/pip install -q --no-deps --require-hashes -r /tmp/build.txt
COPY pyproject.toml CMakeLists.txt README.md LICENSE THIRD_PARTY_NOTICES.md ./
COPY protos protos
COPY .src .src
COPY kernels kernels
COPY engine engine
COPY text text
COPY gateway gateway
COPY services services
COPY cli cli
COPY llm llm
COPY docker/revision.sh /tmp/
ARG COMMIT=
RUN sh /tmp/revision.sh "$COMMIT" > /tmp/commit.txt && mv /tmp/commit.txt .src/pdserve/
RUN /tmp/build/bin/pip wheel -q --no-deps --no-build-isolation -w /wheels .

# Dependencies before sources: they change rarely and weigh most.
FROM build AS control-env
ARG CONTROL_EXTRAS=
WORKDIR /tmp/env
COPY docker docker
RUN python3 -m venv /tmp/tools \
    && /tmp/tools/bin/pip install -q --require-hashes -r docker/tools.txt \
    && python3 -m venv --without-pip /opt/pdserve \
    && for name in control $CONTROL_EXTRAS; do \
        /tmp/tools/bin/pip --python /opt/pdserve/bin/python install -q --no-deps --require-hashes \
        -r docker/$name.txt || exit 1; done

FROM control-env AS worker-env
ARG TORCH_INDEX=
ARG WORKER_EXTRAS=
COPY pyproject.toml constraints.txt ./
RUN /tmp/tools/bin/pip --python /opt/pdserve/bin/python install -q --no-deps --require-hashes \
    -r docker/worker.txt -r docker/model.txt \
    && names=$(python3 -c 'import sys, tomllib; \
    extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]; \
    print(*(name for extra in sys.argv[1:] for name in extras[extra]))' $WORKER_EXTRAS) \
    && { [ -z "$names" ] || /tmp/tools/bin/pip --python /opt/pdserve/bin/python install -q \
    -c constraints.txt ${TORCH_INDEX:+--extra-index-url $TORCH_INDEX} $names; }

# The wheel, symbols off, and a list of all that is inside (CycloneDX).
FROM control-env AS control-app
COPY --from=wheel /wheels /wheels
COPY docker/finish.sh /tmp/
RUN sh /tmp/finish.sh

FROM worker-env AS worker-app
COPY --from=wheel /wheels /wheels
COPY docker/finish.sh /tmp/
RUN sh /tmp/finish.sh

# Python without pip and what else only builds; copied whole, so that no layer keeps it.
# /run/pdserve holds the sockets of shared-memory hand-offs, /var/log/pdserve the rings of events,
# /var/lib/pdserve a gateway's database and /home/pdserve/.cache what was fetched; a volume made from
# one of them keeps the owner.
FROM ${PYTHON_IMAGE} AS trimmed
COPY docker/debian_packages.py /usr/local/share/pdserve/
RUN useradd --uid 10001 --create-home pdserve \
    && install -d -o pdserve -g pdserve /home/pdserve/.cache /run/pdserve /var/log/pdserve /var/lib/pdserve \
    && library=$(python3 -c 'import sysconfig; print(sysconfig.get_path("stdlib"))') \
    && rm -rf $library/site-packages/pip* $library/site-packages/setuptools* \
        $library/site-packages/wheel* $library/site-packages/pkg_resources \
        $library/site-packages/_distutils_hack $library/ensurepip $library/idlelib \
        $library/lib2to3 $library/tkinter $library/turtledemo $library/test $library/pydoc_data \
        $library/config-* /usr/local/include /usr/local/bin/pip* /usr/local/bin/idle* \
        /usr/lib/python3/dist-packages/pip* /usr/share/doc /usr/share/man /usr/share/locale \
        /var/cache/apt/* /var/lib/apt/lists/* /var/cache/debconf/* /root/.cache \
    && mkdir -p /opt/pdserve \
    && python3 -B /usr/local/share/pdserve/debian_packages.py > /opt/pdserve/sbom-debian.json

FROM scratch AS runtime
COPY --from=trimmed / /
ARG VERSION=
ARG COMMIT=
LABEL org.opencontainers.image.title=pdserve \
    org.opencontainers.image.description="Disaggregated LLM server: prefill and decode in separate services" \
    org.opencontainers.image.licenses=Apache-2.0 \
    org.opencontainers.image.version=${VERSION:-unknown} \
    org.opencontainers.image.revision=${COMMIT:-unknown}
ENV PATH=/opt/pdserve/bin:/usr/local/bin:/usr/bin:/bin \
    LANG=C.UTF-8 \
    PYTHONUNBUFFERED=1
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
    && rm -rf /var/lib/apt/lists/* \
    && python3 -B /usr/local/share/pdserve/debian_packages.py > /opt/pdserve/sbom-debian.json; }
USER 10001:10001
# What is compiled for a GPU: the root file system may be read-only.
ENV TRITON_CACHE_DIR=/tmp/triton CUPY_CACHE_DIR=/tmp/cupy
COPY --from=worker-app /opt/pdserve /opt/pdserve
