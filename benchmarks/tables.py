"""Write the README's evidence tables from the result files, so that no figure is typed by hand.

    python -m benchmarks.tables [--check]

A block ``<!-- results: NAME -->`` … ``<!-- /results -->`` of README.md holds what docs/results/NAME.json says.
``--check`` changes nothing and fails where the two differ.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"(<!-- results: (\w+) -->\n).*?(<!-- /results -->)", re.DOTALL)


def render(name: str) -> str:
    """The table of a result file and where it comes from.

    Raises:
        FileNotFoundError: no such result file.
    """
    path = ROOT / "docs" / "results" / f"{name}.json"
    if not path.is_file():
        raise FileNotFoundError(f"README wants docs/results/{name}.json: run the benchmark that writes it")
    content = json.loads(path.read_text())
    if "table" not in content:
        raise FileNotFoundError(f"docs/results/{name}.json is of an unfinished run: start its command again")
    where = content["environment"]
    changed = "+changes" if where["commit"].endswith("+changes") else ""
    source = (
        f"`{content['command']}` on {where['processor']}, {where['cores']} cores, torch {where['torch']}, "
        f"{where['date']}, begun at commit {where['commit'][:7]}{changed}: "
        f"[docs/results/{name}.json](docs/results/{name}.json)"
    )
    return f"{content['table']}\n\n{source}\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail instead of writing")
    options = parser.parse_args(arguments)
    readme = ROOT / "README.md"
    old = readme.read_text()
    try:
        new = BLOCK.sub(lambda match: f"{match[1]}{render(match[2])}{match[3]}", old)
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 1
    if new == old:
        return 0
    if options.check:
        print("README.md differs from docs/results: run python -m benchmarks.tables", file=sys.stderr)
        return 1
    readme.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
