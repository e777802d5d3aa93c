"""Variants of JumboPatchTST beside the published one, on the sets and splits of ``benchmarks.forecasting``.

``python -m benchmarks.forecasting_ablation RESULT --data ../shared/data/series [--out …] [--quick]``

RESULT is the result file of ``benchmarks.forecasting``: the learning rates that JumboPatchTST was given there serve
every variant, and its own runs stand in the first column. The nearest and the farthest horizon, every seed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks import outputs
from benchmarks.forecasting import FULL, QUICK, SETS, Job, chosen_rate, run_all, settings
from benchmarks.series_models import VARIANTS
from jumbo_core.measure.report import ResultFile, markdown_table, mean_spread

PUBLISHED = "JumboPatchTST J=6"


def horizons(plan: dict) -> list[int]:
    return list(dict.fromkeys([plan["horizons"][0], plan["horizons"][-1]]))


def read_result(path: Path, wanted: dict) -> dict:
    """The result file of ``benchmarks.forecasting`` whose choices and runs are taken over.

    Raises:
        FileNotFoundError: no such file.
        ValueError: it is of other settings or lacks runs of JumboPatchTST.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no {path}: RESULT is the file that python -m benchmarks.forecasting writes")
    content = json.loads(path.read_text())
    if content["settings"] != json.loads(json.dumps(wanted)):
        raise ValueError(f"{path} is of other settings: run its command first (both with --quick or both without)")
    if "table" not in content:
        raise ValueError(f"{path} is of an unfinished run: start its command again")
    return content


def table(file: ResultFile, plan: dict, rate_of: dict[str, float]) -> str:
    """Mean and spread of the MSE of every variant, and how its mean compares with the published form's."""
    names, lines, ratios = [PUBLISHED, *VARIANTS], [], {name: [] for name in VARIANTS}
    for data in SETS:
        for horizon in horizons(plan):
            mse = {}
            for name in names:
                jobs = [Job(data, horizon, name, rate_of[data], seed).name for seed in plan["seeds"]]
                mse[name] = mean_spread(file.runs[job]["mse"] for job in jobs)
            for name in VARIANTS:
                ratios[name].append(mse[name][0] / mse[PUBLISHED][0])
            lines.append([data, horizon, *(f"{mean:.3f} ± {spread:.3f}" for mean, spread in mse.values())])
    percent = [f"{100 * (sum(r) / len(r) - 1):+.1f} %" for r in ratios.values()]
    lines.append(["mean change of the MSE", "", "-", *percent])
    return markdown_table(["MSE", "horizon", *names], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path, metavar="RESULT", help="result file of python -m benchmarks.forecasting")
    parser.add_argument("--data", type=Path, required=True, help="folder with ETTh1.csv and exchange_rate.csv")
    parser.add_argument("--quick", action="store_true", help="a few minutes: one seed, beside a --quick RESULT")
    parser.add_argument("--workers", type=int, default=1, help="runs at a time, each on one thread. Default 1")
    arguments = outputs.parse(parser, "forecasting_ablation")
    plan = QUICK if arguments.quick else FULL
    wanted = settings(plan, arguments.data)
    try:
        main_result = read_result(arguments.result, wanted)
    except (FileNotFoundError, ValueError) as error:
        parser.error(str(error))
    file = ResultFile(arguments.out, {**wanted, "variants": VARIANTS})
    taken = ResultFile(arguments.result, wanted)
    rate_of = {data: chosen_rate(taken, plan, data, PUBLISHED) for data in SETS}
    for seed in plan["seeds"]:
        for data in SETS:
            for horizon in horizons(plan):
                name = Job(data, horizon, PUBLISHED, rate_of[data], seed).name
                file.run(name, lambda n=name: main_result["runs"][n])
        jobs = [Job(d, h, m, rate_of[d], seed) for h in horizons(plan) for d in SETS for m in VARIANTS]
        run_all(jobs, file, arguments.data, plan, arguments.workers)
    file.save(rates=rate_of, table=table(file, plan, rate_of))
    print(file.content["table"])


if __name__ == "__main__":
    main()
