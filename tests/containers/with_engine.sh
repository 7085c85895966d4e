#!/usr/bin/env bash
# Runs a command with a Docker Engine and with images to build on: with_engine.sh COMMAND...
#
# An engine that answers is used as it is. In CI, on Debian as root, one is installed and started
# for the time of the command. Where no image registry can be reached, a base image is made of
# Debian's packages, and one to build with that holds what the host's pip downloads.
#
# What the machine does not offer is no failure: the reason is printed and the command not run.
# Nothing is waited for without a limit: SECONDS_TO_PREPARE for each step, SECONDS_TO_RUN for the
# command, after which it has failed.
set -euo pipefail
cd "$(dirname "$0")/../.."
work=$(mktemp -d)
engine=

remove_containers() { # of tests that were ended by force
    local left
    left=$(docker ps --all --quiet --filter name=paceline-test-)
    [ -z "$left" ] || docker rm --force --volumes $left > /dev/null
}

finish() {
    if [ -n "$engine" ]; then
        remove_containers || true
        kill "$engine" 2> /dev/null || true
        for _ in $(seq 60); do kill -0 "$engine" 2> /dev/null || break; sleep 0.5; done
        kill -KILL "$engine" 2> /dev/null || true
    fi
    rm -rf --one-file-system "$work"
}
trap finish EXIT

skip() {
    echo "containers: skipped: $1"
    if [ -s "$work/log" ]; then tail -n 20 "$work/log"; fi
    exit 0
}

attempt() { # WHAT COMMAND...: run it silently, or skip
    local what=$1
    shift
    echo "containers: $what"
    timeout --kill-after=10 "${SECONDS_TO_PREPARE:-400}" "$@" > "$work/log" 2>&1 < /dev/null \
        || skip "could not do this: $what"
}

install_engine() {
    [ -n "${CI:-}" ] || skip "no Docker Engine answers (with CI=true, root on Debian gets one)"
    [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null || skip "no engine, and none can be installed"
    export DEBIAN_FRONTEND=noninteractive
    attempt "refresh the list of Debian's packages" apt-get update
    attempt "install docker.io" apt-get install --yes --no-install-recommends docker.io iptables
    dockerd > "$work/dockerd.log" 2>&1 < /dev/null &
    engine=$!
    for _ in $(seq 60); do
        docker info > /dev/null 2>&1 && remove_containers && return
        kill -0 "$engine" 2> /dev/null || break
        sleep 1
    done
    cp "$work/dockerd.log" "$work/log"
    skip "no engine: dockerd did not start"
}

compose_command() {
    docker compose version > /dev/null 2>&1 && return
    command -v docker-compose > /dev/null && return
    [ -n "${CI:-}" ] && [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null || skip "no compose"
    attempt "install docker-compose" apt-get install --yes --no-install-recommends docker-compose
}

base_image() {
    docker image inspect paceline-python > /dev/null 2>&1 && return
    [ "$(id -u)" = 0 ] || skip "no image registry can be reached, and only root can make an image"
    command -v debootstrap > /dev/null \
        || attempt "install debootstrap" apt-get install --yes --no-install-recommends debootstrap
    attempt "make a base image of Debian's packages" debootstrap --variant=minbase \
        --include=python3,ca-certificates,openssl bookworm "$work/root"
    rm -rf "$work/root"/var/cache/apt/archives/*.deb "$work/root"/var/lib/apt/lists/*
    tar -C "$work/root" -c . | docker import - paceline-python > /dev/null || skip "import failed"
}

build_image() {
    docker image inspect "$BUILD_IMAGE" > /dev/null 2>&1 && return
    attempt "download the packages that images install" .venv/bin/python -m pip download \
        --constraint constraints.txt --dest "$work/wheels" $WHEELS
    cat > "$work/Dockerfile" << 'END'
FROM paceline-python
RUN apt-get update && apt-get install --yes --no-install-recommends python3-pip gcc libc6-dev
COPY wheels /wheels
ENV PIP_NO_INDEX=1 PIP_FIND_LINKS=/wheels
END
    attempt "make an image to build with" docker build --tag "$BUILD_IMAGE" \
        --file "$work/Dockerfile" "$work"
}

timeout 20 docker info > /dev/null 2>&1 || install_engine
compose_command
docker image prune --force --filter until=24h > /dev/null  # what older builds left
free=$(df --output=avail --block-size=G "$(docker info --format '{{.DockerRootDir}}')" | tail -1)
[ "${free//[^0-9]/}" -ge 12 ] || skip "images take 12 GB of disk, and there are $free"
if ! timeout 60 docker pull --quiet python:3.11-slim-bookworm > /dev/null 2>&1; then
    base_image
    export PYTHON_IMAGE=paceline-python
    WHEELS="torch hatchling .[gateway,cuda]"
    BUILD_IMAGE=paceline-build:$(cat constraints.txt pyproject.toml - <<< "$WHEELS" | sha256sum | cut -c1-12)
    export BUILD_IMAGE
    build_image
fi
echo "containers: $*"
PACELINE_CONTAINERS=1 timeout --kill-after=30 "${SECONDS_TO_RUN:-2400}" "$@" < /dev/null
