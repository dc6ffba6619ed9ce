# An image of flowrun, from this folder alone.  torch's CUDA build by default; for its CPU build
# --build-arg PIP_INDEX_URL=... (of torch's CPU wheels) --build-arg PIP_EXTRA_INDEX_URL=... (of the rest).
#
#     docker build -t flowrun .
#     docker run --gpus all --ipc=host -v "$PWD:/work" flowrun recipe=gpt_hybrid launch.device=cuda
FROM python:3.12-slim-bookworm
ARG EXTRAS=digits,tensorboard,text,parquet
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL

# Inductor compiles regions for the CPU by g++.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY . /src
RUN pip install --no-cache-dir "/src[${EXTRAS}]"

WORKDIR /work
ENTRYPOINT ["flowrun"]
