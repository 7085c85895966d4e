#!/usr/bin/env bash
# Runs a command where there is a Chromium or a Firefox: with_browsers.sh COMMAND...
#
# In CI, on Debian as root, both are installed. Where none can be had, the reason is printed and the
# command not run.
set -euo pipefail

chromium=$(command -v chromium google-chrome || true)
firefox=$(command -v firefox-esr firefox || true)
if [ -n "${CI:-}" ] && [ "$(id -u)" = 0 ] && [ -z "$chromium" -o -z "$firefox" ]; then
    export DEBIAN_FRONTEND=noninteractive
    { timeout 120 apt-get update && timeout 300 apt-get install --yes --no-install-recommends \
        chromium firefox-esr; } > /dev/null 2>&1 < /dev/null || echo "browser: not all could be installed"
fi
if ! command -v chromium google-chrome firefox-esr firefox > /dev/null; then
    echo "browser: skipped: there is no browser (with CI=true, root on Debian gets them)"
    exit 0
fi
exec "$@"
