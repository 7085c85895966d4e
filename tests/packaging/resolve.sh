#!/usr/bin/env bash
# Resolves all extras from the public package index with constraints.txt, whatever pip is set up to
# find on this machine; nothing is installed. Wheels must exist for everything but flash-attn, which
# compiles. Where no index can be reached, says so and passes.
#
#   tests/packaging/resolve.sh PYTHON
set -euo pipefail
python=$1
for name in ${!PIP_@}; do
    [ "$name" = PIP_CERT ] || unset "$name"
done
export PIP_CONFIG_FILE=/dev/null PIP_DISABLE_PIP_VERSION_CHECK=1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# The newest pip: older ones download all wheels in a dry run, gigabytes of them.
fetch_pip() {
    timeout 60 "$python" -m pip install --quiet --retries 1 --timeout 5 --target "$work/pip" \
        --upgrade pip
}

skip() {
    echo "resolve: skipped: no package index can be reached"
    exit 0
}

fetch_pip || skip
# dev holds server, gateway and train. fast-deps reads metadata out of the remote wheels.
if ! PYTHONPATH=$work/pip "$python" -m pip install --dry-run --ignore-installed \
    --use-feature=fast-deps --only-binary :all: --constraint constraints.txt \
    ".[cuda,dev,docs]" > "$work/log" 2>&1; then
    fetch_pip || skip  # the network went away meanwhile
    tail -n 40 "$work/log" >&2
    echo "resolve: constraints.txt cannot be satisfied" >&2
    exit 1
fi
echo "resolve: constraints.txt can be satisfied"
