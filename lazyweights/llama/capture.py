"""Activations: what llama.cpp multiplies each weight with, as the scheduler's evaluation callback sees it.

The graph of a model has a node ``MUL_MAT`` for each product of a weight (its first source) with activations (the second),
and ``MUL_MAT_ID`` where a third source sends each token to some of the experts of a weight. Nothing here knows an
architecture. What surprises:

- Weights that are multiplied with the same tensors (``attn_q``, ``attn_k`` and ``attn_v``; ``ffn_gate`` and ``ffn_up``) share
  an accumulator, that of the first. Which do is found out before the run, from the graph of a short batch: each has the
  same list of input tensors, by their addresses.
- A callback that says no more is wanted ends the evaluation of the batch. So a pass that holds the first layers only
  computes no further than these.
- All tokens ask for their logits, or the last layer would see few of them.
- An exception must not leave a ctypes callback. It is kept, the evaluation ends, and `Watcher.check` raises it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lazyweights.errors import LazyWeightsError
from lazyweights.llama.accumulators import Accumulator
from lazyweights.llama.ggml_tensor import F16, F32, I32, Tensors

WEIGHT_SUFFIX = ".weight"

InputKey = tuple[int, int]
"""Addresses of the activations and of the expert numbers (0 without): the same within a graph means the same values."""


@dataclass(frozen=True)
class InputGroup:
    """Weights that are multiplied with the same activations.

    Attributes
    ----------
    weights : tuple of str
        Their names, the leader first.
    n_columns : int
        Elements of an activation row.
    n_matrices : int
        Matrices of a weight: experts or heads of a 3-D one, else 1.
    is_routed : bool
        Whether tokens are sent to experts.
    is_output : bool
        Whether it is the matrix that gives the logits.
    """

    weights: tuple[str, ...]
    n_columns: int
    n_matrices: int
    is_routed: bool
    is_output: bool = False

    @property
    def leader(self) -> str:
        """Name of the first weight, under which values are kept."""
        return self.weights[0]


@dataclass
class _Use:
    """What discovery saw of a weight."""

    n_columns: int
    n_matrices: int
    is_routed: bool
    order: int
    keys: list[InputKey] = field(default_factory=list)


@dataclass(frozen=True)
class _Product:
    """A node that multiplies a weight."""

    name: str
    key: InputKey
    is_routed: bool
    weight: Any
    activations: Any
    ids: Any


class Watcher:
    """Base of evaluation callbacks: finds the products with weights, and keeps what goes wrong."""

    def __init__(self, tensors: Tensors) -> None:
        self.tensors = tensors
        self._failure: BaseException | None = None

    def __call__(self, address: int, ask: bool) -> bool:
        if self._failure is not None:
            return ask  # True: be called again, and then end the evaluation
        try:
            product = self._product(address)
            return self.ask(product) if ask else self.take(product)
        except BaseException as failure:
            self._failure = failure
            return ask

    def ask(self, product: _Product | None) -> bool:
        """Whether this node is wanted."""
        raise NotImplementedError

    def take(self, product: _Product | None) -> bool:
        """Use the node, now computed; return False to end the evaluation of the batch."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise what went wrong in the callback."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _product(self, address: int) -> _Product | None:
        """Return what the node at an address multiplies; None if that is no weight of the model."""
        node = self.tensors.at(address)
        is_routed = node.op == self.tensors.mul_mat_id
        if not is_routed and node.op != self.tensors.mul_mat:
            return None
        weight = self.tensors.at(node.src[0])
        name = _bare_name(weight.name)
        # Views and results of operations are not tensors of the file.
        if weight.view_src or weight.src[0] or not name.endswith(WEIGHT_SUFFIX) or weight.ne[3] != 1:
            return None
        activations = self.tensors.at(node.src[1])
        ids = self.tensors.at(node.src[2]) if is_routed else None
        return _Product(name, (node.src[1], (node.src[2] or 0) if is_routed else 0), is_routed, weight, activations, ids)


def _bare_name(name: bytes) -> str:
    """Return the name of a weight without what a copy for a device adds (``CUDA0#name#0``).

    >>> _bare_name(b"CUDA0#blk.0.attn_q.weight#0"), _bare_name(b"output.weight")
    ('blk.0.attn_q.weight', 'output.weight')
    """
    parts = name.decode("utf-8", "replace").split("#")
    return parts[1] if len(parts) > 1 else parts[0]


class Discovery(Watcher):
    """Notes which weights are multiplied with what; takes nothing."""

    def __init__(self, tensors: Tensors) -> None:
        super().__init__(tensors)
        self._uses: dict[str, _Use] = {}

    def ask(self, product: _Product | None) -> bool:
        if product is not None:
            n_columns, n_matrices = product.weight.ne[0], product.weight.ne[2]
            order = len(self._uses)
            use = self._uses.setdefault(product.name, _Use(n_columns, n_matrices, product.is_routed, order))
            use.keys.append(product.key)
            use.is_routed |= product.is_routed
        return False

    def groups(self) -> list[InputGroup]:
        """Return the groups in the order of the graph; the last one gives the logits."""
        by_input: dict[tuple[Any, ...], list[str]] = {}
        for name, use in self._uses.items():
            by_input.setdefault((*use.keys, use.n_columns, use.n_matrices, use.is_routed), []).append(name)
        last = max(self._uses, key=lambda name: self._uses[name].order, default="")
        return [
            InputGroup(tuple(names), use.n_columns, use.n_matrices, use.is_routed, last in names and not last.startswith("blk."))
            for names in by_input.values()
            for use in [self._uses[names[0]]]
        ]


class Collector(Watcher):
    """Feeds accumulators.

    Parameters
    ----------
    tensors : Tensors
    groups : sequence of InputGroup
        All of the model.
    accumulators : dict of str to Accumulator
        Of the leaders of this pass.
    """

    def __init__(self, tensors: Tensors, groups: Sequence[InputGroup], accumulators: dict[str, Accumulator]) -> None:
        super().__init__(tensors)
        self.accumulators = accumulators
        self._leaders = {name: group.leader for group in groups for name in group.weights}
        self._taken: dict[str, list[InputKey]] = {}
        self._n_products: dict[int, int] = {}
        self._batch_tokens = 0
        self._left = -1

    def start_batch(self, n_tokens: int) -> None:
        """Begin a batch. The first one of a size tells how many products there are to take; later ones end after these."""
        self._taken.clear()
        self._batch_tokens = n_tokens
        self._left = self._n_products.get(n_tokens, -1)

    def end_batch(self) -> None:
        """End a batch: check that it gave what was to be taken.

        Raises
        ------
        LazyWeightsError
            If it did not, or anything that went wrong in the callback.
        """
        self.check()
        missing = self.accumulators.keys() - self._taken.keys()
        if missing or self._left > 0:
            raise LazyWeightsError("llama.cpp did not multiply this weight in this batch", tensor=min(missing, default=None))
        self._n_products[self._batch_tokens] = sum(map(len, self._taken.values()))

    def ask(self, product: _Product | None) -> bool:
        if self._left == 0:
            return True  # another part of the graph, after the last product was taken: end that at once too
        if product is None:
            return False
        leader = self._leaders.get(product.name)
        if leader is None or leader not in self.accumulators:
            return False
        if product.name == leader:
            return True
        if product.key not in self._taken.get(leader, ()):
            raise LazyWeightsError(f"this weight no longer shares its input with {leader}", tensor=product.name)
        return False

    def take(self, product: _Product | None) -> bool:
        if product is None or self._left == 0:
            return False
        self._taken.setdefault(product.name, []).append(product.key)
        self._add(product, self.accumulators[product.name])
        self._left -= 1
        return self._left != 0

    def _add(self, product: _Product, accumulator: Accumulator) -> None:
        if product.activations.type not in (F32, F16):
            raise LazyWeightsError("its input is not of floats", tensor=product.name, found=product.activations.type)
        values = self.tensors.values(product.activations)
        n_matrices = product.weight.ne[2]
        if product.is_routed:
            for matrix, rows in _routed(product.name, values, self.tensors.values(product.ids), product.ids.type, n_matrices):
                accumulator.add(matrix, rows)
        elif n_matrices == 1:
            accumulator.add(0, values.reshape(-1, values.shape[-1]))
        else:
            for outer in values:
                for i, rows in enumerate(outer):
                    accumulator.add(i * n_matrices // len(outer), rows)


def _routed(
    name: str, values: np.ndarray, ids: np.ndarray, ids_type: int, n_experts: int
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield each expert with the rows that are sent to it, in the order of the tokens.

    Parameters
    ----------
    values : numpy.ndarray
        (1, tokens, 1 or experts used, columns): a row for each expert that is used, or one for all of them.
    ids : numpy.ndarray
        int32 (1, 1, tokens, experts used).
    """
    numbers = ids[0, 0]
    rows = values[0]
    if ids_type != I32 or len(values) != 1 or len(numbers) != len(rows):
        raise LazyWeightsError("its tokens are sent to experts in a way that is not known", tensor=name)
    if numbers.min(initial=0) < 0 or numbers.max(initial=0) >= n_experts:
        raise LazyWeightsError("tokens are sent to experts that there are not", tensor=name, found=int(numbers.max()))
    for expert in np.unique(numbers):
        tokens, places = np.nonzero(numbers == expert)
        yield int(expert), rows[tokens, places % rows.shape[1]]
