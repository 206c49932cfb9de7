"""What the bytes of each GGML type mean: `split` a packed tensor into planes, `join` them back.

The two are inverse bijections on all byte strings, for every type of `types.GGML_TYPES`. Importing this
package compiles nothing and loads no numba; the kernels load with the first tensor that needs them.
"""

from .layout import PlaneSpec
from .planes import Planes, join, plane_names, plane_specs, split
from .types import GGML_TYPES, TYPE_BY_NAME, GGMLType, type_name

__all__ = [
    "GGML_TYPES",
    "TYPE_BY_NAME",
    "GGMLType",
    "PlaneSpec",
    "Planes",
    "join",
    "plane_names",
    "plane_specs",
    "split",
    "type_name",
]
