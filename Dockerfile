# The image of Bedrock Price Keeper; docs/deployment.md tells how it is run.
#   docker build -t price-keeper .
#   docker build -t price-keeper --build-arg COMPILED=0 .      in pure Python: no compiler is installed to build it
# The base has the Python that all tests run on. Name one by its digest to have the same image every time:
#   --build-arg BASE=python:3.11-slim-bookworm@sha256:...
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS build
ARG COMPILED=1
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /build
COPY requirements/ requirements/
RUN python -m venv --without-pip /opt/price-keeper \
 && python -m pip --python /opt/price-keeper/bin/python install --require-hashes -r requirements/run.lock
# A compiler, and mypy, which compiles: in this stage alone.
# hadolint ignore=DL3008
RUN if [ "$COMPILED" = 1 ]; then \
      apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev \
      && rm -rf /var/lib/apt/lists/* \
      && python -m venv --without-pip /build/venv \
      && python -m pip --python /build/venv/bin/python install --require-hashes -r requirements/build.lock; \
    else ln -s /opt/price-keeper /build/venv; fi
COPY LICENSE README.md pyproject.toml setup.py ./
COPY proxy/ proxy/
RUN PRICE_KEEPER_COMPILED="$COMPILED" python -m pip --python /build/venv/bin/python wheel -q --no-deps --no-build-isolation -w dist . \
 && python -m pip --python /opt/price-keeper/bin/python install --no-deps dist/*.whl \
 && python -m pip --python /opt/price-keeper/bin/python uninstall -q -y setuptools \
 && python -m compileall -q -f --invalidation-mode unchecked-hash /opt/price-keeper/lib

# What is in the image, as CycloneDX has it. A stage of its own, since it tells of a base without a compiler.
FROM ${BASE} AS bill
COPY --from=build /opt/price-keeper /opt/price-keeper
COPY deploy/docker/sbom.py /sbom.py
RUN /opt/price-keeper/bin/python /sbom.py > /sbom.cdx.json

FROM ${BASE}
ARG BASE
ARG VERSION=0.2.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="Bedrock Price Keeper" \
      org.opencontainers.image.description="A sidecar for Amazon Bedrock that keeps every org and app inside its budget." \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="${BASE}"
COPY --from=build /opt/price-keeper /opt/price-keeper
COPY --from=bill /sbom.cdx.json /usr/share/price-keeper/sbom.cdx.json
# The journal is all that is written. Relative paths of a configuration start here.
RUN install -d -o 10001 -g 10001 -m 0700 /var/lib/price-keeper
WORKDIR /var/lib/price-keeper
VOLUME /var/lib/price-keeper
# PRICE_KEEPER_PROBE is where the control port is, for the check below.
ENV PATH=/opt/price-keeper/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 PRICE_KEEPER_PROBE=127.0.0.1:8081
USER 10001:10001
EXPOSE 8080 8081 8082
HEALTHCHECK --interval=30s --timeout=5s --start-period=10s CMD ["python", "-ISc", "import http.client, os, sys; probe = http.client.HTTPConnection(os.environ['PRICE_KEEPER_PROBE'], timeout=3); probe.request('GET', '/health'); sys.exit(probe.getresponse().status != 200)"]
ENTRYPOINT ["price-keeper"]
CMD ["serve", "--config", "/etc/price-keeper/config.yaml"]
