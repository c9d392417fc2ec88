"""The native codec. Addresses are integers, and nothing is checked when they are used."""

FLOAT32: int
BFLOAT16: int
FLOAT16: int
BOOL: int

cuda_built: bool
"""Whether the CUDA kernels were built; CudaCodec exists only then."""

cpu_isa: str
"""The instruction set that CpuCodec uses here: "avx2" or "baseline"."""

class CpuCodec:
    def __init__(
        self, dtype: int, bits: int, group_size: int, stochastic: bool, keep_positive: bool, simd: bool = True
    ) -> None: ...
    def encode(self, source: int, out: int, numel: int, key0: int, key1: int, threads: int) -> None: ...
    def decode(self, packed: int, out: int, numel: int, threads: int) -> None: ...

class CudaCodec:
    def __init__(
        self, dtype: int, bits: int, group_size: int, stochastic: bool, keep_positive: bool, device: int
    ) -> None: ...
    def encode(self, source: int, out: int, numel: int, key0: int, key1: int, stream: int) -> None: ...
    def decode(self, packed: int, out: int, numel: int, stream: int) -> None: ...
