#!/usr/bin/env bash
# Builds images of ForgeMQ; without names all of them. Usage: deploy/images/build.sh [NAME...]
# TAG is their tag (the revision), BASE another base image with Python 3.11, DOCKER another client,
# BUILD_OPTIONS more of its options.
set -euo pipefail
cd "$(dirname "$0")/../.."
${DOCKER:-docker} version >/dev/null 2>&1 || {
    echo "images: no Docker engine answers; on Debian: apt-get install docker.io, then dockerd" >&2
    exit 1
}
revision=$(git rev-parse --short=12 HEAD 2>/dev/null || echo unknown)
tag=${TAG:-$revision}
if [ $# -eq 0 ]; then
    # shellcheck disable=SC2046  # Names are words.
    set -- $(sed -n 's/^\[\(.*\)\]$/\1/p' deploy/images/contents.toml | grep -v '^tools$') demo-model
fi
for name in "$@"; do
    echo "images: building forgemq-$name:$tag"
    file=deploy/images/Dockerfile
    [ "$name" != demo-model ] || file=deploy/demo/Dockerfile
    # shellcheck disable=SC2086  # Options are words.
    DOCKER_BUILDKIT=1 ${DOCKER:-docker} build --quiet -f "$file" \
        -t "forgemq-$name:$tag" --build-arg IMAGE="$name" --build-arg REVISION="$revision" \
        ${BASE:+--build-arg BASE="$BASE"} ${BUILD_OPTIONS:-} .
done
