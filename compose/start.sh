#!/bin/sh
# What the containers run:
#
#   start.sh setup                        makes secrets in /run/paceline, downloads the target, and ends
#   start.sh verifier|drafter ARGUMENT... a service, with the target that setup has chosen
#   start.sh all ARGUMENT...              paceline serve, with a gateway on port 8000
#
# The target is PACELINE_TARGET, or else SmolLM2, which is downloaded once into the home's volume; where that
# is not possible, the demo target of the image.
set -eu

choose_target() {
    if [ -n "${PACELINE_TARGET:-}" ]; then
        target=$PACELINE_TARGET
    elif paceline fetch smollm2; then
        target=smollm2
    else
        target=/paceline/models/demo/target
        echo "SmolLM2 cannot be downloaded (see above): serving the demo target, which continues text but cannot chat"
    fi
    echo "$target" > "$HOME/target.new"
    mv "$HOME/target.new" "$HOME/target"
}

command=$1
shift
case $command in
    setup)
        /paceline/secrets.sh /run/paceline
        choose_target
        exit
        ;;
    all)
        choose_target
        set -- "$target" --gateway-address 0.0.0.0:8000 --gateway-insecure "$@"
        command=serve
        ;;
    drafter)
        case " $* " in
            *" --load"*) ;;
            *) set -- "$@" --target "$(cat "$HOME/target")" ;;
        esac
        ;;
    *) set -- "$@" --target "$(cat "$HOME/target")" ;;
esac
exec paceline "$command" "$@"
