"""Symbols to bits and back. Knows nothing of GGUF.

- `package_merge`: optimal code lengths under a limit;
- `canonical`: codewords and look-up tables from code lengths;
- `lanes`: plain Python reference of the lane streams, both layouts;
- `lane_encode`, `lane_kernels`: the same in numba, encoder and decoder; `vector_encode`, `vector_kernels`: the same for CPUs
  with AVX-512;
- `rans`: the other coder, reference and numba; `vector_rans`, `vector_rans_encode`: the same for CPUs with AVX-512;
- `trellis`: codes whose low bits follow from the codes above them;
- `table_pool`: few tables for many contexts; `size_kernels`: what they take.
"""

MAX_CODE_LENGTH = 11
"""Longest codeword in bits: an 11-bit window always holds a whole codeword."""

ALPHABET_SIZE = 256
"""Symbols are bytes; narrower alphabets use the low symbols only."""

N_LANES = 32
"""Lanes of a stream: a warp's threads, a decode unit's engines."""

ROWS_PER_LANE = 2
"""Rows of a tile that one lane decodes, one after the other."""

TILE_ROWS = N_LANES * ROWS_PER_LANE
"""Rows of a tile (and of a row group): 64."""

TABLE_SIZE = 1 << MAX_CODE_LENGTH
"""Entries of one decode table."""
