"""Print constraints that keep pip from replacing torch, and what it brings, where they are already there."""

from importlib import metadata


def installed(name: str) -> "str | None":
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


# Without a CUDA build of torch nothing brings a triton; 3.6.0 is then for its interpreter and its compiler.
print(f"torch=={installed('torch')}")
print(f"triton=={installed('triton') or '3.6.0'}")
# CUDA's headers, the first of which a CUDA build of torch from PyPI brings; otherwise those of that build's CUDA.
print(f"nvidia-cuda-runtime=={installed('nvidia-cuda-runtime') or '13.0.96'}")
print(f"nvidia-cuda-crt=={installed('nvidia-cuda-crt') or '13.0.88'}")
