"""Ranks of codebook indices: those that the grids of the gguf package give, and a bijection."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import quants

from lazyweights.blocks.codebook_ranks import indices_by_rank, ranks_of_indices

GRIDS = {"IQ1_S": quants.IQ1_S, "IQ1_M": quants.IQ1_S, "IQ2_XS": quants.IQ2_XS, "IQ2_S": quants.IQ2_S, "IQ3_S": quants.IQ3_S}


@pytest.mark.parametrize("name", GRIDS)
def test_ranks_are_those_of_the_lengths_of_grid_points(name: str) -> None:
    GRIDS[name].init_grid()
    grid = np.asarray(GRIDS[name].grid)
    sums = (grid.reshape(-1, grid.shape[-1]).astype(np.int64) ** 2).sum(axis=1)
    expected = sorted(range(len(sums)), key=lambda index: (sums[index], index))
    assert indices_by_rank(name).tolist() == expected
    np.testing.assert_array_equal(ranks_of_indices(name)[indices_by_rank(name)], np.arange(len(sums)))
