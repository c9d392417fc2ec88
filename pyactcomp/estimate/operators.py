"""Operators on phantom tensors: shapes by torch's fake kernels, results as phantoms.

The results of an operator depend on the shapes, layouts and other arguments alone, so each combination is worked out
once: a step repeats the operators of the last, and a block those of the block before.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import PyactcompError
from ..torch_private import phantom as private
from ..torch_private import recurrent
from .gpus import Gpu
from .kernel_memory import BIASED_PRODUCTS, PRODUCTS, REDUCTIONS, blocks_of, multiplies

_serving: Operators | None = None
_HALF_BYTES = 2
_SHAPES = {**private.SHAPES_OF_KERNELS, **recurrent.SHAPES}
_ALIGNMENT = 16  # elements: the widest loads take 16 bytes, of elements of at least one


@dataclass(frozen=True)
class _New:
    """A result with memory of its own; results of one operator may share it, by its number."""

    memory: int
    nbytes: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class _View:
    """A result over the memory of an argument, by the argument's index among the tensors; the offset counts from it."""

    argument: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class _Host:
    """A result on the host: zeros."""

    dtype: torch.dtype
    size: tuple[int, ...]


@dataclass(frozen=True)
class _Same:
    """An argument that the operator writes and returns, by its index among the tensors; ``size`` if it gets one."""

    argument: int
    size: tuple[int, ...] | None


@dataclass(frozen=True)
class _Plan:
    result: Any
    blocks: list[int]
    multiplies: bool
    biased: bool
    seconds: float


class Operators:
    """Serves operators that return new tensors.

    Attributes
    ----------
    reads : dict of str to int
        Operators whose answer depends on values, and how often each was asked; the answer was True.
    seconds : float
        What the operators so far take at the rates that the GPU reaches: for their FLOPs, or for the bytes that they
        read and write, whichever takes longer. Not counted: kernels of this package, and operators that write in place.
    """

    def __init__(self, native: Any, gpu: Gpu) -> None:
        self._native = native
        self._gpu = gpu
        self.seconds = 0.0
        self._mode = private.fake_mode()
        self._plans: dict[Any, _Plan] = {}
        self.reads: dict[str, int] = {}
        writing, others, whole = private.operators(REDUCTIONS)
        products, biased = (
            [each for each in writing if each[0].partition("::")[2].rstrip("_") in names]
            for names in (PRODUCTS, BIASED_PRODUCTS)
        )
        native.register_operators(
            [each for each in writing if each not in (*products, *biased)], products, biased, others
        )
        self._registrations = [*private.serve_others(self, whole), recurrent.serve()]

    @classmethod
    def serve(cls, native: Any, gpu: Gpu) -> Operators:
        """Return the operators of this process, which they serve until its end."""
        global _serving
        if _serving is None:
            _serving = cls(native, gpu)
        return _serving

    @property
    def convolves(self) -> bool:
        """Whether convolutions ran."""
        return any(operator._schema.name == "aten::convolution_backward" for operator, *_ in self._plans)

    def __call__(self, operator: Any, *args: Any, **kwargs: Any) -> Any:
        """Run an operator."""
        tensors: list[Tensor] = []
        firsts: dict[int, tuple[int, int]] = {}
        key = (operator, _key(args, tensors, firsts), _key(tuple(kwargs.items()), tensors, firsts))
        plan = self._plans.get(key)
        if plan is None:
            if operator._schema.name == "aten::equal":
                self.reads["equal"] = self.reads.get("equal", 0) + 1
                return True
            plan = self._plans[key] = self._planned(operator, args, kwargs, tensors)
        if plan.multiplies:
            self._native.take_workspace(plan.biased)
        made: dict[int, Tensor] = {}
        result = self._made(plan.result, tensors, made)
        if plan.blocks:
            self._native.temporary(plan.blocks)
        self.seconds += plan.seconds
        return result

    def _made(self, result: Any, tensors: list[Tensor], made: dict[int, Tensor]) -> Any:
        kind = type(result)
        if kind is _New:
            base = made.get(result.memory)
            if base is not None:
                return self._native.alias(base, result.dtype, result.size, result.stride, result.offset)
            out = self._native.fresh(result.nbytes, result.dtype, result.size, result.stride, result.offset)
            made[result.memory] = out
            return out
        if kind is _View:
            base = tensors[result.argument]
            offset = base.storage_offset() + result.offset
            return self._native.alias(base, result.dtype, result.size, result.stride, offset)
        if kind is _Same:
            out = tensors[result.argument]
            return out if result.size is None else out.resize_(result.size)
        if kind is _Host:
            return torch.zeros(result.size, dtype=result.dtype, device="cpu")
        if kind in (tuple, list):
            return kind([self._made(each, tensors, made) for each in result])
        return result

    def _planned(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> _Plan:
        metas: dict[int, torch.UntypedStorage] = {}
        owners: dict[int, int] = {}
        fakes: list[Tensor] = []
        for index, tensor in enumerate(tensors):
            storage = private.storage_key(tensor)
            meta = metas.get(storage)
            if meta is None:
                meta = metas[storage] = private.meta_storage(tensor.untyped_storage().nbytes())
                owners[meta._cdata] = index
            flat = torch.empty(0, dtype=tensor.dtype, device="meta")
            flat.set_(meta, tensor.storage_offset(), tensor.size(), tensor.stride())
            fakes.append(private.fake(self._mode, flat, tensor.device))
        given = iter(fakes)
        fake_args = _replaced(args, given)
        fake_kwargs = dict(_replaced(tuple(kwargs.items()), given))
        try:
            with torch.no_grad(), self._mode:
                out = _shapes(operator, fake_args)(*fake_args, **fake_kwargs)
        except private.DEPENDS_ON_VALUES:
            raise PyactcompError(
                f"the model decides by values: the size of what {operator} returns depends on them{_where()}. Phantom "
                "tensors have none: measure this model with a real batch, or give a function without that branch"
            ) from None
        except private.HAS_NO_SHAPES as error:
            if type(error) is RuntimeError and private.ASSERTION not in str(error):
                raise
            said = str(error).partition("\n")[0] or type(error).__name__
            raise PyactcompError(
                f"torch does not know the shapes that {operator} returns without running it{_where()} ({said}): "
                "register a fake implementation (torch.library.register_fake)"
            ) from None
        identities = {id(each): index for index, each in enumerate(fakes)}
        result = self._described(out, tensors, identities, owners, {})
        name = operator._schema.name.partition("::")[2]
        seconds = self._roofline(operator, fake_args, fake_kwargs, out, result, fakes)
        blocks = blocks_of(self._gpu, operator, args, kwargs)
        return _Plan(result, blocks, multiplies(self._gpu, operator, args), name in BIASED_PRODUCTS, seconds)

    def _roofline(self, operator: Any, args: Any, kwargs: Any, out: Any, result: Any, read: list[Tensor]) -> float:
        """Return the seconds of an operator at the rates that a GPU reaches; zero for one that only returns views."""
        results = result if type(result) in (tuple, list) else (result,)
        written = sum(each.nbytes for each in results if type(each) is _New)
        if not written:
            return 0.0
        moved = written + sum(each.numel() * each.itemsize for each in read)
        wide = any(each.itemsize > _HALF_BYTES for each in read if each.is_floating_point())
        flops = private.flops(operator, args, kwargs, out)
        return max(flops / self._gpu.flops(wide), moved / self._gpu.bandwidth)

    def _described(
        self,
        out: Any,
        tensors: list[Tensor],
        identities: dict[int, int],
        owners: dict[int, int],
        memories: dict[int, int],
    ) -> Any:
        if not isinstance(out, Tensor):
            if isinstance(out, (tuple, list)):
                return type(out)([self._described(each, tensors, identities, owners, memories) for each in out])
            return out
        size = tuple(out.size())
        if id(out) in identities:
            index = identities[id(out)]
            return _Same(index, None if size == tensors[index].size() else size)
        if out.device.type == "cpu":
            return _Host(out.dtype, size)
        storage = out.untyped_storage()
        stride, offset = tuple(out.stride()), int(out.storage_offset())
        owner = owners.get(storage._cdata)
        if owner is not None:
            return _View(owner, out.dtype, size, stride, offset - int(tensors[owner].storage_offset()))
        memory = memories.setdefault(storage._cdata, len(memories))
        return _New(memory, storage.nbytes(), out.dtype, size, stride, offset)


def _shapes(operator: Any, args: tuple[Any, ...]) -> Any:
    """Return what computes the shapes of an operator's results.

    That is the operator, or all its overloads, of which one takes it, where a number stands for a tensor as in
    ``x % 2``; or our own function, where torch's is stricter than the kernel.
    """
    of_kernel = _SHAPES.get(operator._schema.name.partition("::")[2])
    if of_kernel is not None:
        return of_kernel
    pairs = zip(operator._schema.arguments, args, strict=False)
    stands = any(type(each.type) is torch.TensorType and isinstance(given, (int, float)) for each, given in pairs)
    return operator._overloadpacket if stands else operator


def _key(value: Any, tensors: list[Tensor], firsts: dict[int, tuple[int, int]]) -> Any:
    """Return the metadata of an argument, as a key, and collect the tensors in it.

    Where a tensor begins in its memory counts by its alignment, and by the distance from the first tensor in that
    memory: a loop over a sequence takes a slice at each step.

    Parameters
    ----------
    firsts : dict of int to tuple of int
        Of each memory the first tensor's index and offset.
    """
    kind = type(value)
    if isinstance(value, Tensor):
        offset = int(value.storage_offset())
        first, begin = firsts.setdefault(private.storage_key(value), (len(tensors), offset))
        tensors.append(value)
        place = (first, offset - begin, offset % _ALIGNMENT)
        return (place, value.dtype, value.shape, value.stride(), value.is_cuda)
    if kind in (tuple, list):
        return tuple([_key(each, tensors, firsts) for each in value])
    return (kind, value)


def _replaced(value: Any, fakes: Any) -> Any:
    if isinstance(value, Tensor):
        return next(fakes)
    if type(value) in (tuple, list):
        return type(value)([_replaced(each, fakes) for each in value])
    return value


def _where() -> str:
    """Return the line of the program that asked, as a clause of a sentence."""
    return line_of(traceback.walk_stack(sys._getframe(1)))


def line_of(frames: Iterable[tuple[Any, int]]) -> str:
    """Return the innermost line that is the program's own, as a clause of a sentence; the innermost frame is first."""
    for frame, line in frames:
        file = frame.f_code.co_filename
        if not any(part in file for part in ("/torch/", "/pyactcomp/", "<")):
            return f", in {file}:{line}"
    return ""
