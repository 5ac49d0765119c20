"""What a variant is compiled from, as one digest: while it stays, compiling again would give the same machine code.

It is the key of Triton's own cache: device code with all that it calls, types and constants of arguments (`CompiledFor`: with their
code), options, and the compiler itself.
"""

from __future__ import annotations

import hashlib

from halfbyte.kernels.aot.compiling import Configuration, Target, source


def digest(configuration: Configuration, target: Target) -> str:
    """A digest of everything that decides what a variant compiles to on an architecture, with this Triton and this Python."""
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.cache import get_cache_key

    backend = make_backend(GPUTarget("cuda", target.capability, 32))
    options = backend.parse_options(dict(configuration.options))
    key = get_cache_key(source(configuration), backend, options, get_cache_invalidating_env_vars())
    return hashlib.sha256(key.encode()).hexdigest()[:16]
