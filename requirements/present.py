"""Print constraints that keep pip from replacing the torch and triton that are already there."""

from importlib import metadata


def installed(name: str) -> "str | None":
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


# Without a CUDA build of torch nothing brings a triton; 3.6.0 is then for its interpreter and its compiler.
print(f"torch=={installed('torch')}")
print(f"triton=={installed('triton') or '3.6.0'}")
