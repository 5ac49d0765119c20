"""What a variant is compiled from, as two digests: while one of them stays, compiling again would give the same machine code.

`digest`, which takes no time, is of the key of Triton's own cache: device code with all that it calls, types and constants of its
arguments (`CompiledFor`: with their code), options, and the compiler itself. `code`, which takes 0.2 s, is of the intermediate code
after the first stage of the compiler, with calls inlined: all that later stages read. It stays where lines move or names change.
"""

from __future__ import annotations

import hashlib
from typing import Any

from halfbyte.kernels.compiling import Configuration, Target, source


def digest(configuration: Configuration, target: Target) -> str:
    """A digest of everything that decides what a variant compiles to on an architecture, with this Triton and this Python."""
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.runtime.cache import get_cache_key

    backend, options = _compiler(configuration, target)
    key = get_cache_key(source(configuration), backend, options, get_cache_invalidating_env_vars())
    return hashlib.sha256(key.encode()).hexdigest()[:16]


def code(configuration: Configuration, target: Target) -> str:
    """A digest of what a variant's code is after the first stage, with its options; what compiling raises comes out as it is."""
    from triton._C.libtriton import get_cache_invalidating_env_vars, ir

    backend, options = _compiler(configuration, target)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    made_from = source(configuration)
    functions = backend.get_codegen_implementation(options)
    module = made_from.make_ir(backend.target, options, functions, backend.get_module_map(), context)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, made_from.language)
    for name, stage in stages.items():
        module = stage(module, dict(vars(options)))
        if name in ("ttir", "ttgir"):  # of Triton, of Gluon
            break
    environment = sorted(get_cache_invalidating_env_vars().items())
    text = "\n".join([module.str_nodebug(), options.hash(), backend.hash(), repr(environment)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _compiler(configuration: Configuration, target: Target) -> tuple[Any, Any]:
    """Triton's backend for an architecture, and a variant's options as it reads them."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend

    backend = make_backend(GPUTarget("cuda", target.capability, 32))
    return backend, backend.parse_options(dict(configuration.options))
