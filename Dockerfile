# Paceline with torch's CPU build on a slim Python, without a compiler in the image that runs.
#   docker build -t paceline . && docker run --rm --shm-size 2g paceline run --nproc-per-node 2 examples/digits.py
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /paceline
COPY . .
RUN pip wheel --no-cache-dir --no-deps -w /wheels .

FROM python:${PYTHON}-slim
# ssh is for `paceline run --hosts`; encrypted connections use the image's OpenSSL.
RUN apt-get update && apt-get install -y --no-install-recommends openssh-client && rm -rf /var/lib/apt/lists/*
ARG TORCH="torch"
# An index of torch's CPU builds makes the image smaller: --build-arg TORCH="torch --index-url ADDRESS"
RUN pip install --no-cache-dir ${TORCH}
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir /wheels/*.whl scikit-learn && rm -rf /wheels
RUN useradd --create-home paceline
USER paceline
WORKDIR /home/paceline
COPY --chown=paceline examples examples
RUN paceline --version
# Workers of a DataLoader share memory in /dev/shm, of which Docker gives 64 MiB unless --shm-size says otherwise.
ENTRYPOINT ["paceline"]
CMD ["doctor"]
