# Images of DASE: docs/kubernetes.md, "The image".
#
#   docker build -t dase .                                                       every role, CPU
#   docker build -t dase:cuda --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 .
#   docker build -t dase:replay --target replay .                                the replay alone, without torch
#
# torch's CUDA wheels bring NVIDIA's libraries along, so the base is slim for both. For builds that repeat to
# the byte name the base by its digest: --build-arg BASE=docker.io/library/python@sha256:...
# Versions of all packages: deploy/image, made by scripts/write_image_pins.py.
ARG BASE=docker.io/library/python:3.11-slim-bookworm

# hadolint ignore=DL3006
FROM ${BASE} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
COPY deploy/image/build.txt deploy/image/build.txt
# Two environments: one that installs, and one that goes into the image, without pip.
RUN python3 -m venv /opt/pip && \
    /opt/pip/bin/pip install -r deploy/image/build.txt && \
    python3 -m venv --without-pip /opt/dase

FROM build AS wheel
COPY pyproject.toml README.md LICENSE ./
COPY dase_grpc dase_grpc
RUN /opt/pip/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /wheel .

FROM build AS build-replay
COPY deploy/image/replay.txt deploy/image/replay.txt
RUN /opt/pip/bin/pip --python /opt/dase/bin/python install --only-binary :all: -r deploy/image/replay.txt
COPY --from=wheel /wheel /wheel
RUN /opt/pip/bin/pip --python /opt/dase/bin/python install --no-deps --no-index /wheel/*.whl

FROM build AS build-full
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY deploy/image/full.txt deploy/image/full.txt
RUN /opt/pip/bin/pip --python /opt/dase/bin/python install --only-binary :all: \
    --extra-index-url "${TORCH_INDEX}" -r deploy/image/full.txt
COPY --from=wheel /wheel /wheel
RUN /opt/pip/bin/pip --python /opt/dase/bin/python install --no-deps --no-index /wheel/*.whl

# What both images share. The root file system may be read-only: whatever writes, writes under /tmp, or where
# it is told to. MuJoCo draws nothing in training, so no image holds OpenGL; `dase evaluate --video` is for a
# machine that has it. There is no HEALTHCHECK: probes ask /healthz and /readyz on the metrics port.
# hadolint ignore=DL3006
FROM ${BASE} AS runtime
ENV PATH=/opt/dase/bin:$PATH \
    PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    USER=dase HOME=/tmp XDG_CACHE_HOME=/tmp/cache MPLCONFIGDIR=/tmp/cache/matplotlib MPLBACKEND=Agg \
    TORCHINDUCTOR_CACHE_DIR=/tmp/cache/torchinductor TRITON_CACHE_DIR=/tmp/cache/triton \
    MUJOCO_GL=disabled OMP_NUM_THREADS=1
WORKDIR /tmp
USER 65532:65532
STOPSIGNAL SIGTERM
ENTRYPOINT ["dase"]
ARG VERSION=0.2.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="DASE" \
      org.opencontainers.image.description="Deterministic actor-critic with shared experience over gRPC" \
      org.opencontainers.image.licenses="MIT" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"

FROM runtime AS replay
COPY --from=build-replay /opt/dase /opt/dase

FROM runtime AS full
COPY --from=build-full /opt/dase /opt/dase
