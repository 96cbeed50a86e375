# SGLang on a CPU, for a cluster without GPUs: the locked packages and ForgeMQ's platform plug-in.
# Build from the root: docker build -f deploy/engine/cpu.Dockerfile .
FROM python:3.11-slim-bookworm AS build
RUN pip install --no-cache-dir uv==0.13.9
ENV UV_PYTHON_DOWNLOADS=never VIRTUAL_ENV=/venv
WORKDIR /source
COPY requirements.lock overrides.txt ./
COPY libs/sglang_cpu libs/sglang_cpu
RUN uv venv /venv && uv pip install --no-cache --compile-bytecode \
    --constraint requirements.lock --override overrides.txt ./libs/sglang_cpu

FROM python:3.11-slim-bookworm
# torch compiles some of SGLang's functions with the machine's compiler.
RUN apt-get update && apt-get install -y --no-install-recommends g++ libnuma1 \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /venv /venv
ENV PATH=/venv/bin:$PATH PYTHONUNBUFFERED=1 HOME=/tmp USER=forgemq
USER 65532:65532
ENTRYPOINT ["python3", "-m", "sglang.launch_server"]
