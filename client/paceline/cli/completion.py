"""`paceline completion`: what a shell needs to complete the command line."""

import argparse

import shtab

from paceline.cli.main import COMMANDS, build_parser


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the shell's name."""
    parser.add_argument(
        "shell",
        choices=["bash", "zsh", "tcsh"],
        help='put `eval "$(paceline completion bash)"` into ~/.bashrc, or the like for others',
    )


def run(args: argparse.Namespace) -> int:
    """Print the script; 0."""
    print(shtab.complete(build_parser(COMMANDS), shell=args.shell))
    return 0
