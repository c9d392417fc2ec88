"""The exceptions of pyactcomp.

Wrong arguments raise :class:`TypeError` or :class:`ValueError`; a state that makes a correct answer
impossible raises :class:`PyactcompError` or a subclass. Every message says what was got, what was
expected and what to do.
"""


class PyactcompError(RuntimeError):
    """The base of everything pyactcomp raises for a state rather than an argument."""


class ImplementationUnavailableError(PyactcompError):
    """An implementation was asked for by name and cannot run here; it never falls back silently."""


class HookConflictError(PyactcompError):
    """Another pair of saved-tensor hooks is active where ours would be installed."""
