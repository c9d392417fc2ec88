"""Which tensors PyTorch's own formulas for gradients save, read from the file that its autograd is generated from."""

from __future__ import annotations

import functools
import hashlib
import json
import tempfile
from pathlib import Path

import torch
import torchgen
from torchgen.api.autograd import SavedAttribute

_PACKAGED = Path(torchgen.__file__).parent / "packaged"
_KEPT = Path(__file__).parents[1] / "build"
_NESTED = "AutogradNestedTensor"


@functools.cache
def saved_by_operator() -> dict[str, set[str]]:
    """Return the tensors that each operator saves for backward.

    The generator's own parser decides: it leaves out an argument of which a formula wants no more than sizes, dtype,
    layout, strides or options. Named are an operator's tensor arguments, under their names in its schema, and its
    results: ``result``, of several ``result0``, ``result1``, ... or the names that the schema gives them.

    Returns
    -------
    dict of str to set of str
        Keyed as schemas write it, ``addmm`` and ``add.Tensor``. An operator with a formula that saves no tensor has an
        empty set. What the formulas for nested tensors save besides is not counted. An operator in place has an entry
        of its own only where its formula differs from that of the operator out of place.

    Examples
    --------
    >>> sorted(saved_by_operator()["addmm"]), sorted(saved_by_operator()["exp"]), sorted(saved_by_operator()["abs"])
    (['mat1', 'mat2'], ['result'], ['self'])
    """
    # The parser takes five seconds of each process that collects tests, and its answer is torch's.
    key = f"{torch.__version__} {torch.version.git_version} {Path(__file__).read_text()}"
    kept = _KEPT / f"derivatives-{hashlib.sha256(key.encode()).hexdigest()[:12]}.json"
    if kept.exists():
        return {operator: set(names) for operator, names in json.loads(kept.read_text()).items()}
    saved = _parsed()
    _KEPT.mkdir(exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=_KEPT, delete=False) as file:
        json.dump({operator: sorted(names) for operator, names in saved.items()}, file)
    Path(file.name).replace(kept)
    return saved


def _parsed() -> dict[str, set[str]]:
    from torchgen.packaged.autograd.load_derivatives import load_derivatives

    native = _PACKAGED / "ATen" / "native"
    formulas, _ = load_derivatives(
        str(_PACKAGED / "autograd" / "derivatives.yaml"),
        str(native / "native_functions.yaml"),
        str(native / "tags.yaml"),
    )
    saved: dict[str, set[str]] = {}
    for schema, by_key in formulas.items():
        results = schema.returns
        tensors = {argument.name for argument in schema.arguments.flat_all if argument.type.is_tensor_like()}
        tensors |= {result.name or f"result{i}" for i, result in enumerate(results) if result.type.is_tensor_like()}
        tensors |= {"result"} if len(results) == 1 and results[0].type.is_tensor_like() else set()
        saved[str(schema.name)] = {
            attribute.expr
            for key, info in by_key.items()
            if key != _NESTED
            for attribute in (*info.all_saved_inputs, *info.all_saved_outputs)
            if attribute.expr in tensors and attribute.expr == _name(attribute)
        }
    return saved


def _name(attribute: SavedAttribute) -> str:
    """Return what a node calls what it saves: ``self_info`` is made of ``self``, but is not the tensor."""
    name = attribute.nctype.name
    return name if isinstance(name, str) else name.name
