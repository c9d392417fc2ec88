"""``python -m pyactcomp`` is the ``pyactcomp`` command."""

from .cli import main

if __name__ == "__main__":
    main()
