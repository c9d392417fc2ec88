"""Programs in processes of their own, forked from one that has imported what most of them import first."""

from __future__ import annotations

import gc
import multiprocessing
import os
import runpy
import subprocess
import sys
from pathlib import Path

import torch

# A package that is not installed is left out.
PRELOAD = ["pyactcomp", "torch.distributed.fsdp", "transformers.models.bert.modeling_bert", "transformers.trainer"]

context = multiprocessing.get_context("forkserver")
# A process that was forked from one that looked for CUDA cannot use CUDA: with a GPU, each imports for itself.
context.set_forkserver_preload([] if torch.cuda.is_available() else PRELOAD)


def _run(file: Path, folder: Path, outputs: list[Path]) -> None:
    for stream, output in enumerate(outputs, 1):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT), stream)
    os.chdir(folder)
    gc.freeze()  # collections of the program walk what it makes, and not every package
    sys.argv, sys.path = [str(file)], ["", *sys.path]
    runpy.run_path(str(file), run_name="__main__")


def run(file: Path, folder: Path, outputs: Path) -> subprocess.CompletedProcess[str]:
    """Run a file in ``folder``; its standard streams go to files in ``outputs``."""
    streams = [outputs / "stdout", outputs / "stderr"]
    process = context.Process(target=_run, args=(file, folder, streams))
    process.start()
    process.join()
    assert process.exitcode is not None
    stdout, stderr = (stream.read_text() for stream in streams)
    return subprocess.CompletedProcess(str(file), process.exitcode, stdout, stderr)
