#!/bin/sh
# What the containers run:
#
#   start.sh setup                        makes secrets in /run/paceline, downloads the target, and ends
#   start.sh verifier|drafter ARGUMENT... a service, with the target that setup has chosen
#   start.sh all ARGUMENT...              paceline serve, with a gateway on port 8000
#
# The target is PACELINE_TARGET: a path, or a name, which is downloaded once into the home's volume (smollm2, or
# ORG/NAME of the Hugging Face hub). Default: SmolLM2; where it cannot be downloaded, the demo target of the image.
set -eu

choose_target() {
    target=${PACELINE_TARGET:-smollm2}
    case $target in
        /*) ;;
        *)
            if paceline fetch "$target"; then
                :
            elif [ -n "${PACELINE_TARGET:-}" ]; then
                exit 1
            else
                target=/paceline/models/demo/target
                echo "SmolLM2 cannot be downloaded (see above): serving the demo target, which continues text but cannot chat"
            fi
            ;;
    esac
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
        set -- "$target" --gateway-address 0.0.0.0:8000 --insecure "$@"
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
