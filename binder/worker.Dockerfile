# syntax=docker/dockerfile:1
# A machine that works for a session: docker build -f binder/worker.Dockerfile -t guava-worker .
#   docker run --rm -i guava-worker < join-code      (the code on standard input: never as an argument, where `ps` shows it)
#   docker run --rm -e GUAVA_JOIN_CODE guava-worker  (from the variable of your shell)
# With GPUs: --build-arg BASE=pytorch/pytorch:2.9.1-cuda12.8-cudnn9-runtime, and `docker run --gpus all`; a torch that the base
# has is kept. Without: give pip's index of CPU builds by --build-arg PIP_EXTRA_INDEX_URL, or torch brings CUDA's libraries.
ARG BASE=python:3.12-slim

FROM ${BASE} AS wheel
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY guava_nb guava_nb
RUN python -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM ${BASE} AS worker
ARG PIP_EXTRA_INDEX_URL=""
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    python -m pip install --no-cache-dir /wheels/*.whl \
    && useradd --create-home --non-unique --uid 1000 guava
USER 1000
WORKDIR /home/guava
# One thread for each worker process; more of them only wait for each other where the processors are shared.
ENV PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
# `guava worker` is process 1 and starts one process for each device: without one it has not joined, or has lost its session.
HEALTHCHECK --interval=30s --timeout=5s --start-period=60s --retries=3 \
    CMD ["sh", "-c", "grep -qsa 'guava_nb[.]worker[.]process' /proc/[0-9]*/cmdline"]
# SIGTERM lets workers hand over what only they hold, and leave; Docker waits for --stop-timeout (10 s by default).
STOPSIGNAL SIGTERM
ENTRYPOINT ["guava", "worker"]
