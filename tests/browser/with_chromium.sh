#!/usr/bin/env bash
# Runs a command where there is a Chromium: with_chromium.sh COMMAND...
#
# In CI, on Debian as root, one is installed. Where none can be had, the reason is printed and the
# command not run.
set -euo pipefail

skip() {
    echo "browser: skipped: $1"
    exit 0
}

if ! command -v chromium google-chrome > /dev/null; then
    [ -n "${CI:-}" ] || skip "there is no chromium (with CI=true, root on Debian gets one)"
    [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null || skip "no chromium, and none can be installed"
    export DEBIAN_FRONTEND=noninteractive
    { timeout 120 apt-get update && timeout 300 apt-get install --yes --no-install-recommends chromium; } \
        > /dev/null 2>&1 < /dev/null || skip "chromium could not be installed"
fi
exec "$@"
