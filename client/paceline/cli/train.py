"""`paceline train`: trains targets and drafters."""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sub-commands of training."""
    from paceline.train import cli

    cli.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run the one in `args`; the exit code."""
    from paceline.train import cli

    return cli.main(args)
