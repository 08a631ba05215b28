# syntax=docker/dockerfile:1
# The image for CUDA: vLLM's own, with EFA, one build of NIXL, the router and the patched wheel.
# Serves as prefill, decode and, with `--entrypoint vllm-router`, as router.
#
#   pdlaunch build image --tag pdlaunch:latest
#
# builds the wheel, lays out the context and passes the arguments that have no default here.
ARG VLLM_VERSION=0.32.0
# Of the same vLLM; its tag decides the CUDA.
ARG BASE_IMAGE=vllm/vllm-openai:v${VLLM_VERSION}
FROM ${BASE_IMAGE}

SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# 1.47 is the first with a libfabric that NIXL's plugin can use. Only its user-space libraries are
# wanted: the kernel module and the limits are the host's, and adapters are not there to verify.
ARG EFA_INSTALLER_VERSION=1.47.0
# Of the installer's archive; empty: not checked.
ARG EFA_INSTALLER_SHA256=""
WORKDIR /tmp/efa
# NIXL's plugin for libfabric links to hwloc and does not bring it.
# hadolint ignore=DL3008
RUN curl --fail --silent --show-error --location --retry 3 --output installer.tar.gz \
        "https://efa-installer.amazonaws.com/aws-efa-installer-${EFA_INSTALLER_VERSION}.tar.gz" \
    && if [ -n "${EFA_INSTALLER_SHA256}" ]; then \
        echo "${EFA_INSTALLER_SHA256}  installer.tar.gz" | sha256sum --check --strict; \
    fi \
    && tar --extract --gzip --strip-components=1 --file installer.tar.gz \
    && apt-get update \
    && apt-get install --yes --no-install-recommends libhwloc15 \
    && ./efa_installer.sh -y --skip-kmod --skip-limit-conf --no-verify \
    && ldconfig \
    && rm -rf /var/lib/apt/lists/* /tmp/efa/*
# Another libfabric on the path would not know EFA, or not this version of it.
ENV LD_LIBRARY_PATH=/opt/amazon/efa/lib:${LD_LIBRARY_PATH}

# The meta package asks for the builds of both CUDA majors, and the wrong one may be loaded.
ARG NIXL_VERSION=1.5.1
ARG ROUTER_VERSION=0.1.17
RUN cuda_major="$(python3 -c 'import torch; print(torch.version.cuda.partition(".")[0])')" \
    && python3 -m pip uninstall --yes nixl nixl-cu12 nixl-cu13 \
    && python3 -m pip install --no-cache-dir --no-deps \
        "nixl-cu${cuda_major}==${NIXL_VERSION}" "nixl==${NIXL_VERSION}" \
    && python3 -m pip install --no-cache-dir "vllm-router==${ROUTER_VERSION}"

# The packages that vLLM needs are in the base image: it is the same version.
RUN --mount=type=bind,source=dist,target=/tmp/dist \
    python3 -m pip install --no-cache-dir --no-deps /tmp/dist/vllm-*.whl

ARG VLLM_VERSION
ARG ENGINE_VERSION
ARG SERIES_HASH
LABEL org.opencontainers.image.title="pdlaunch" \
      org.opencontainers.image.description="vLLM with push-mode NIXL KV transfer" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${ENGINE_VERSION}" \
      pdlaunch.vllm.version="${VLLM_VERSION}" \
      pdlaunch.series.hash="${SERIES_HASH}"

COPY launcher/pdlaunch/engine_scripts/verify_image.py /usr/local/share/pdlaunch/verify_image.py

# The base image made this user, `vllm`, for its entry point below. By number, so that a cluster can
# tell that it is not root.
USER 2000:0
WORKDIR /home/vllm
RUN python3 /usr/local/share/pdlaunch/verify_image.py --version "${ENGINE_VERSION}"

ENTRYPOINT ["/usr/local/bin/vllm-nonroot-entrypoint.sh"]
