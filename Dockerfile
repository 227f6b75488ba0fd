# syntax=docker/dockerfile:1
# docker build -t llmconv .
# docker build -t llmconv --build-arg PIP_OPTIONS="--extra-index-url URL" .   with an index of CPU builds of torch
# docker run --rm -u "$(id -u):$(id -g)" -v "$PWD:/work" llmconv to-hf ep4.pt -o base

FROM python:3.11-slim AS build
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.11-slim
ARG PIP_OPTIONS=""
COPY --from=build /wheels /wheels
# hadolint ignore=DL3013,SC2086
RUN pip install --no-cache-dir $PIP_OPTIONS /wheels/*.whl
ENV HF_HOME=/tmp/huggingface XDG_CACHE_HOME=/tmp/cache
WORKDIR /work
USER 1000:1000
ENTRYPOINT ["llmconv"]
CMD ["--help"]
