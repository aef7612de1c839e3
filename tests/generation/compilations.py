"""Counting what JAX compiles, by JAX's own events."""

import contextlib

from jax import monitoring


@contextlib.contextmanager
def counted_compilations():
    """Yield a list that gets an entry for every program that XLA compiles, or loads from the persistent cache."""
    compiled = []

    def listen(event, seconds, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(seconds)

    monitoring.register_event_duration_secs_listener(listen)
    try:
        yield compiled
    finally:
        monitoring.unregister_event_duration_listener(listen)
