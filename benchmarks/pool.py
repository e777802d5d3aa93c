"""Named runs in processes of their own, each saved as it ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
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
        Whatever a job raises; jobs that have not begun are then left out, those that have ended stay saved.
    """
    todo = {name: job for name, job in jobs.items() if name not in file.runs}
    if not todo:
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool, Progress() as progress:
        bar = progress.add_task("runs", total=len(todo))
        futures = {pool.submit(*job): name for name, job in todo.items()}
        try:
            for future in as_completed(futures):
                name, result = futures[future], future.result()
                file.run(name, lambda r=result: r)
                if say is not None:
                    progress.console.print(say(name, result), soft_wrap=True)
                progress.advance(bar)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
