"""Named runs in processes of their own, each saved as it ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from itertools import islice
from multiprocessing import get_context

from rich.progress import Progress

from jumbo_core.measure.report import ResultFile


def run_jobs(
    jobs: Mapping[str, tuple], file: ResultFile, workers: int, say: Callable[[str, dict], str] | None = None
) -> None:
    """Run what the file lacks.

    Args:
        jobs: name of a run -> (function, argument, …) that returns its result, a dict; both go to another process.
        file: where results are looked up and saved.
        workers: processes at a time.
        say: name and result -> a line to print. Default: none.

    Raises:
        Whatever a job raises: no other is begun then, and those under way end and are saved before it is raised.
    """
    todo = {name: job for name, job in jobs.items() if name not in file.runs}
    if not todo:
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool, Progress() as progress:
        bar, waiting, running, failure = progress.add_task("runs", total=len(todo)), iter(todo.items()), {}, None
        while True:
            # As many as there are workers: what a pool has taken beyond them it runs to the end, come what may.
            for name, job in islice(waiting, workers - len(running) if failure is None else 0):
                running[pool.submit(*job)] = name
            if not running:
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                name = running.pop(future)
                if future.exception() is not None:
                    failure = failure or future.exception()
                    continue
                result = future.result()
                file.run(name, lambda r=result: r)
                if say is not None:
                    progress.console.print(say(name, result), soft_wrap=True)
                progress.advance(bar)
        if failure is not None:
            raise failure
