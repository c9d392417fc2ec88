"""axolotl: a plugin named in the YAML file."""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

from .transformers import CompressionCallback


class Arguments(BaseModel):
    """The key of the YAML file that the plugin adds."""

    pyactcomp: dict[str, Any] | None = None


class CompressionPlugin(BasePlugin):
    """Adds :class:`~pyactcomp.integrations.transformers.CompressionCallback` to the trainer that axolotl builds.

    Options of the callback are the mapping ``pyactcomp`` of the YAML file.

    Examples
    --------
    >>> import yaml
    >>> from pyactcomp.integrations.axolotl import CompressionPlugin
    >>> config = yaml.safe_load('''
    ... plugins: [pyactcomp.integrations.axolotl.CompressionPlugin]
    ... pyactcomp: {mode: lossless}
    ... ''')
    >>> CompressionPlugin().add_callbacks_pre_trainer(config, model=None)[0].options
    {'mode': 'lossless'}
    """

    def get_input_args(self) -> str:
        """Return the name of the class with the keys that this plugin adds."""
        return f"{__name__}.{Arguments.__name__}"

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[Any]:
        """Return the callback, with the options of the YAML file."""
        return [CompressionCallback(**(cfg.get("pyactcomp") or {}))]
