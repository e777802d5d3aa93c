"""``python -m jumbo_core.measure``: what models cost, in closed form (``flops``) and by the clock (all others)."""

from __future__ import annotations

from jumbo_core.measure import collection
from jumbo_core.measure.artefacts import write
from jumbo_core.measure.commands import make_parser, module_of, result_of


def main(arguments: list[str] | None = None) -> None:
    parser, subparsers = make_parser()
    report = subparsers.add_parser("report", help="every table that is claimed", description=collection.__doc__)
    collection.add_arguments(report)
    options = parser.parse_args(arguments)
    if options.command == "report":
        collection.run(options)
        return
    try:
        result = result_of(options)
    except (ValueError, TypeError, ImportError) as error:  # of what was asked for; RuntimeErrors are failed gates
        parser.error(str(error))
    print(result["table"])
    if options.out:
        write(options.out, options.command, result, getattr(module_of(options.command), "picture", None))


if __name__ == "__main__":
    main()
