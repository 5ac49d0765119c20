"""`Launch`: a kernel with its grid and arguments, before it is compiled."""

from __future__ import annotations

from typing import Any, NamedTuple


class Launch(NamedTuple):
    """One launch. `arguments`: all of the kernel's, constants last. `options`: what the compiler is given with them."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def __call__(self, compiled: Any = None) -> Any:
        """Launch on the current stream; returns what was compiled, by which another call of the same types bypasses the JIT."""
        if compiled is None:
            return self.kernel[self.grid](*self.arguments, **self.options)
        compiled[(*self.grid, 1, 1)[:3]](*self.arguments)
        return compiled
