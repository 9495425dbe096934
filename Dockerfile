# Trainpace in an image of its own, as a user without rights.
#   docker build --tag trainpace .                                                         torch for the CPU
#   docker build --tag trainpace --build-arg TORCH_INDEX=https://pypi.org/simple .         torch for CUDA; run it with --gpus all
#   docker run --rm --volume "$PWD:/work" --volume trainpace:/data trainpace resnet50 --gpu T4
FROM python:3.11-slim AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /source
RUN python -m venv /opt/trainpace \
 && /opt/trainpace/bin/pip install --no-cache-dir --index-url "$TORCH_INDEX" torch
COPY pyproject.toml README.md LICENSE ./
COPY man man
COPY src src
RUN /opt/trainpace/bin/pip install --no-cache-dir ".[data,serve]"

FROM python:3.11-slim
COPY --from=build /opt/trainpace /opt/trainpace
# the journal and recordings; whoever runs the image (docker run --user) may write there
RUN useradd --uid 1000 --create-home trainpace && install --directory --mode 1777 /data /work
ENV PATH=/opt/trainpace/bin:$PATH XDG_DATA_HOME=/data
WORKDIR /work
USER 1000:1000
ENTRYPOINT ["trainpace"]
CMD ["--help"]
