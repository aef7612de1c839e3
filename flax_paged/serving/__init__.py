"""An OpenAI-compatible HTTP server over `AsyncEngine`. Needs the extra `serve`; docs/serving.md shows its use.

Reading order: `options` (limits), `protocol` (what clients send), `sampling` (the same for the engine), `service`
(admission, tokenization, the engine's pieces), `answers`, `completions` and `chat` (pieces as OpenAI's bodies),
`middleware` (what every call passes), `app` (the routes), `memory` and `server` (the process: fit, port, signals).
"""

from flax_paged.serving.app import create_app
from flax_paged.serving.memory import MemoryPlan, free_memory, plan_memory
from flax_paged.serving.options import ServerOptions
from flax_paged.serving.server import open_socket, serve
from flax_paged.serving.service import Service

__all__ = [
    "MemoryPlan",
    "ServerOptions",
    "Service",
    "create_app",
    "free_memory",
    "open_socket",
    "plan_memory",
    "serve",
]
