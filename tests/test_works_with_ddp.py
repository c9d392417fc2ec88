"""Works with: DistributedDataParallel."""

from __future__ import annotations

from pathlib import Path

import distributed_worker as worker
import pytest
from works_with import GRADIENT_BOUND, assert_compressed, relative_error

WORLD = 2


@pytest.mark.parametrize("backend", worker.BACKENDS)
def test_ddp_gradients_agree_across_ranks_and_with_one_process(backend: str, tmp_path: Path) -> None:
    worker.need_devices(backend, WORLD)
    ranks = worker.run(worker.ddp, backend, WORLD, tmp_path)
    exact = worker.exact_gradients("cpu")
    for nesting in ("compress inside", "compress outside"):
        results = [rank[nesting] for rank in ranks]
        for found, report in results:
            assert 0.0 < relative_error(found, exact) <= GRADIENT_BOUND
            assert_compressed(report)
            worker.assert_no_weight_compressed(report)
        assert relative_error(results[0][0], results[1][0]) == 0.0
