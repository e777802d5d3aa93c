"""The measuring commands: their arguments, and a result for each, the same from a command line and in the report."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from types import ModuleType

from jumbo_core.measure import artefacts, flops_table, scaling, speed

WITH_ARGUMENTS = {"flops": flops_table, "speed": speed, "scaling": scaling}
# Modules without arguments of their own beyond rounds and threads: default rounds and what the command is for.
PLAIN = {
    "scan": (15, "the scan against Transformers' torch path, and how it grows with length"),
    "block": (15, "a linear block against its own matrix products"),
    "tofu": (15, "token fusion in a ViT-B: time saved against multiply-adds saved"),
}
ON_CUDA = ("scan", "block")
PURPOSES = {
    "flops": "parameters and multiply-adds in closed form, as a table",
    "speed": "whole models by name against each other, ours and peers: inference or training",
    "scaling": "time, peak memory and multiply-adds over image sizes",
}


def make_parser() -> tuple[argparse.ArgumentParser, argparse._SubParsersAction]:
    """A parser with a subparser for every module, and the action that takes more of them."""
    parser = argparse.ArgumentParser(prog="python -m jumbo_core.measure")
    commands = parser.add_subparsers(dest="command", required=True)
    for name in (*WITH_ARGUMENTS, *PLAIN):
        if name in PLAIN:
            repeats, purpose = PLAIN[name]
            own = commands.add_parser(name, help=purpose)
            own.add_argument(
                "--repeats", type=artefacts.at_least(2), default=repeats, help=f"timed rounds (default {repeats})"
            )
            own.add_argument("--threads", type=artefacts.at_least(1), default=2, help="default 2")
            if name in ON_CUDA:
                own.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
        else:
            module = WITH_ARGUMENTS[name]
            own = commands.add_parser(name, help=PURPOSES[name], description=module.__doc__)
            module.add_arguments(own)
        own.add_argument(
            "--out", type=Path, help=f"write the result too: a .json file, or a folder for {name}.json, .csv and .png"
        )
        if name == "tofu":
            own.add_argument(
                "--batch", type=artefacts.at_least(1), nargs="+", default=[8, 1], help="batch sizes (default 8 1)"
            )
            own.add_argument(
                "-r", type=artefacts.at_least(1), default=16, help="tokens that leave in each block (default 16)"
            )
    return parser, commands


def module_of(command: str) -> ModuleType:
    """What measures: has ``table(result)``, and where there is something to see ``picture(result, axes)``."""
    return WITH_ARGUMENTS.get(command) or importlib.import_module(f"jumbo_core.measure.{command}")


def result_of(options: argparse.Namespace) -> dict:
    """Run the command of parsed options; the result has its markdown under "table"."""
    module = module_of(options.command)
    if options.command in PLAIN:
        settings = dict(batches=options.batch, r=options.r) if options.command == "tofu" else {"device": options.device}
        result = module.measure(repeats=options.repeats, threads=options.threads, **settings)
    else:
        result = module.result_of(options)
    return result | {"table": module.table(result)}
