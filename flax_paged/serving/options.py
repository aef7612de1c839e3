"""`ServerOptions`: what the server allows."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """What the server allows, and what it calls itself.

    Args:
        model_name: The model's name in the API.
        adapter_names: Names in the API of the model's stacked LoRA adapters, in their order.
        api_key: Calls must bring it as `Authorization: Bearer ...`; None lets everybody in. The chat page and /health
            need no key.
        max_body_bytes: Larger bodies are refused with 413.
        body_timeout: Seconds that a request's headers, and then its body, may take to arrive.
        max_num_answers: Most answers of one call: prompts times `n` or `best_of`.
        max_num_waiting: Calls are refused with 429 while this many prompts wait for a place in a step.
        queue_timeout: Seconds a prompt may wait for a place before its call ends with 429.
        request_timeout: Seconds a call may take in all before it ends with 504.
        shutdown_grace: Seconds that running calls have to finish after a SIGTERM.
        allowed_origins: Web origins whose pages may call the server (CORS); none by default.
        log_prompts: Write prompts to the log.

    Raises:
        ValueError: A limit leaves nothing to serve.
    """

    model_name: str
    adapter_names: tuple[str, ...] = ()
    api_key: str | None = None
    max_body_bytes: int = 4 * 2**20
    body_timeout: float = 30.0
    max_num_answers: int = 128
    max_num_waiting: int = 256
    queue_timeout: float = 60.0
    request_timeout: float = 600.0
    shutdown_grace: float = 30.0
    allowed_origins: tuple[str, ...] = ()
    log_prompts: bool = False

    def __post_init__(self):
        if not self.model_name:
            raise ValueError("ServerOptions(model_name=''): expected a name.")
        names = (self.model_name, *self.adapter_names)
        if "" in names or len(set(names)) < len(names):
            raise ValueError(
                f"ServerOptions(model_name, adapter_names) are {names}: expected names that all differ, none empty."
            )
        if self.api_key == "":
            raise ValueError("ServerOptions(api_key=''): expected a key, or None to let everybody in.")
        for name in ("max_body_bytes", "max_num_answers", "max_num_waiting"):
            if getattr(self, name) < 1:
                raise ValueError(f"ServerOptions({name}={getattr(self, name)}): expected at least 1.")
        for name in ("body_timeout", "queue_timeout", "request_timeout"):
            if not getattr(self, name) > 0:
                raise ValueError(f"ServerOptions({name}={getattr(self, name)}): expected more than 0 seconds.")
        if not self.shutdown_grace >= 0:
            raise ValueError(f"ServerOptions(shutdown_grace={self.shutdown_grace}): expected 0 seconds or more.")
