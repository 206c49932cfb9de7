"""The compiled kernels equal their own text run as plain Python, and load only when they are needed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from lazyweights.blocks import GGML_TYPES, TYPE_BY_NAME, split

from .samples import random_bytes

KERNEL_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "MXFP4")

PLAIN_PYTHON = """
import sys
import numpy as np
from lazyweights.blocks import GGML_TYPES, join, kernels, split

assert type(kernels.split_q4_0).__name__ == "function"
source = np.load(sys.argv[1])
result = {}
for key, data in source.items():
    type_id = int(key)
    planes = split(type_id, data, (GGML_TYPES[type_id].block_size, 7))
    assert np.array_equal(join(planes), data), key
    result.update({f"{key} {name}": plane for name, plane in planes.planes.items()})
np.savez(sys.argv[2], **result)
"""


def run_python(code: str, *arguments: str, **environment: str) -> None:
    subprocess.run([sys.executable, "-W", "error", "-c", code, *arguments], env=os.environ | environment, check=True)


def test_kernels_equal_plain_python(tmp_path: Path) -> None:
    type_ids = [TYPE_BY_NAME[name].type_id for name in KERNEL_TYPES]
    shapes = {type_id: (GGML_TYPES[type_id].block_size, 7) for type_id in type_ids}
    data = {type_id: random_bytes(type_id, shape, seed=5) for type_id, shape in shapes.items()}
    np.savez(tmp_path / "source.npz", **{str(type_id): packed for type_id, packed in data.items()})
    run_python(
        PLAIN_PYTHON,
        str(tmp_path / "source.npz"),
        str(tmp_path / "result.npz"),
        NUMBA_DISABLE_JIT="1",
    )
    plain = np.load(tmp_path / "result.npz")
    compiled = {
        f"{type_id} {name}": plane
        for type_id, packed in data.items()
        for name, plane in split(type_id, packed, shapes[type_id]).planes.items()
    }
    assert set(plain.files) == set(compiled)
    for name, plane in compiled.items():
        np.testing.assert_array_equal(plain[name], plane, err_msg=name)


def test_importing_the_room_loads_no_numba() -> None:
    run_python(
        "import sys, lazyweights.blocks as b\n"
        "assert b.plane_names(12) and b.split(0, bytes(4), (1,))\n"
        "assert 'numba' not in sys.modules\n"
        "b.split(2, bytes(18), (32,))\n"
        "assert 'numba' in sys.modules\n",
        NUMBA_DISABLE_JIT="1",
    )
