"""Whether the numba kernels are compiled for this machine yet: the first use takes about a minute."""

from __future__ import annotations

import glob
import os
from typing import Any


def needs_compiling() -> bool:
    """Return whether the kernels are not in numba's cache on disk yet. Loads numba."""
    from lazyweights.container import group_decode, group_encode

    kernels: tuple[Any, ...] = (group_encode.encode_groups, group_decode.decode_groups)
    for function in kernels:
        cache = getattr(function, "_cache", None)
        folder = getattr(cache, "cache_path", None)
        name = f"{function.__module__.rpartition('.')[2]}.{function.__name__}-*.nbi"
        if folder is None or not glob.glob(os.path.join(folder, name)):
            return True
    return False
