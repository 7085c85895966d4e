#!/usr/bin/env bash
# Runs a command with gcc's sanitizers in the compiled kernels: with_sanitizers.sh NAMES COMMAND...
#
# NAMES are those of -fsanitize=, such as address,undefined. Where gcc or the runtime of a sanitizer
# is missing, the reason is printed and the command not run.
set -euo pipefail

skip() {
    echo "sanitize: skipped: $1"
    exit 0
}

names=$1
shift
command -v gcc > /dev/null || skip "there is no gcc"
preload=
for name in ${names//,/ }; do
    case $name in
        address) runtime=libasan.so ;;
        undefined) runtime=libubsan.so ;;
        *) echo "sanitize: $name is unknown, expected address or undefined" >&2; exit 2 ;;
    esac
    found=$(gcc -print-file-name="$runtime") # the name alone where gcc does not have it
    [ -e "$found" ] || skip "gcc has no $runtime"
    preload="$preload $found"
done
# Python itself and torch release little at their end: leaks are not reported.
export PACELINE_SANITIZE=$names LD_PRELOAD=$preload
export ASAN_OPTIONS=detect_leaks=0:verify_asan_link_order=0
exec "$@"
