"""Measure a server: `python scripts/benchmark_serve.py --url http://127.0.0.1:8000 --rates 1 2 4`.

Open loop: calls arrive at random (Poisson) at each rate, whether or not earlier ones have been answered, as users do.
Any OpenAI-compatible URL will do. It needs httpx and, for --plot, matplotlib.

With --compare-engine MODEL the script starts no load of its own but answers one question: how much of the engine's own
speed arrives through HTTP? It serves the model from this process on a free port, and takes turns between the engine
alone and as many clients in a process of their own.
"""

import argparse
import asyncio
import dataclasses
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

try:
    import httpx
except ImportError as error:
    sys.exit(f"error: {error}. The benchmark needs it: pip install httpx")

_WORDS = (
    "the",
    "quick",
    "brown",
    "fox",
    "over",
    "lazy",
    "dog",
    "while",
    "seven",
    "wise",
    "owls",
    "count",
    "paged",
    "keys",
)
_PERCENTILES = (50, 90, 99)


@dataclasses.dataclass
class Call:
    """What was seen of one call.

    Fields:
        start: When it was sent, in seconds.
        arrivals: When each chunk with text came.
        num_tokens: Tokens of the answer, as the server counts them.
        end: When it ended.
        error: What went wrong; None if nothing did.
    """

    start: float
    arrivals: list[float] = dataclasses.field(default_factory=list)
    num_tokens: int = 0
    end: float = math.nan
    error: str | None = None

    @property
    def time_to_first_token(self) -> float:
        """Seconds until the first text; nan if there was none."""
        return self.arrivals[0] - self.start if self.arrivals else math.nan

    @property
    def time_per_output_token(self) -> float:
        """Seconds between tokens after the first, on average; nan if there is none."""
        if not self.arrivals or self.num_tokens < 2:
            return math.nan
        return (self.arrivals[-1] - self.arrivals[0]) / (self.num_tokens - 1)


def main(argv: list[str] | None = None) -> int:
    """Run the script; returns the exit status."""
    args = parse_args(argv)
    try:
        if args.compare_engine:
            result = compare_with_engine(args)
        else:
            result = asyncio.run(measure_rates(args))
    except (ValueError, OSError, httpx.HTTPError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.json_file:
        Path(args.json_file).write_text(json.dumps(result, indent=2) + "\n")
    if args.plot and "rates" in result:
        plot(result["rates"], args.plot)
    return 0


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Measure an OpenAI-compatible server under open-loop load.")
    add = parser.add_argument
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--url", help="the server, with or without /v1")
    what.add_argument("--compare-engine", metavar="MODEL", help="compare HTTP with the engine alone")
    add("--model", help="the model's name (the server's first)")
    add("--api-key", help="(the variable OPENAI_API_KEY)")
    add("--rates", type=float, nargs="+", default=[1.0], metavar="R", help="calls a second; inf for all at once (1)")
    add("--num-calls", type=int, default=50, help="calls at each rate (50)")
    add("--prompt-words", type=int, default=64, help="words of a prompt (64)")
    add("--max-tokens", type=int, default=64, help="tokens of an answer (64)")
    add("--ignore-eos", action="store_true", help="answers of full length, where the server knows vLLM's ignore_eos")
    add("--seed", type=int, default=0, help="of arrivals and prompts (0)")
    add("--num-clients", type=int, default=16, help="with --compare-engine (16)")
    add("--repeats", type=int, default=3, help="turns of each side, with --compare-engine (3)")
    add("--json-file", metavar="FILE", help="write all numbers here")
    add("--plot", metavar="FILE", help="draw latencies over the rate, as PNG")
    return parser.parse_args(argv)


async def measure_rates(args: argparse.Namespace) -> dict:
    """Measure each rate, and print a table."""
    url = args.url.rstrip("/").removesuffix("/v1") + "/v1"
    key = args.api_key or os.environ.get("OPENAI_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    rows = []
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=None, limits=limits) as client:
        model = args.model or (await client.get("/models")).raise_for_status().json()["data"][0]["id"]
        print("| calls/s | done | failed | tokens/s | first token p50 | p90 | p99 | a token p50 | p90 | p99 |")
        print("|---|---|---|---|---|---|---|---|---|---|")
        for rate in args.rates:
            row = summary(rate, await open_loop(client, model, rate, args))
            rows.append(row)
            cells = [f"{row[name][f'p{p}'] * 1e3:.1f} ms" for name in _LATENCIES for p in _PERCENTILES]
            counts = [f"{rate:g}", str(row["num_done"]), str(row["num_failed"]), f"{row['tokens_per_second']:.1f}"]
            print("| " + " | ".join(counts + cells) + " |", flush=True)
    return {"url": url, "model": model, "options": vars(args), "rates": rows}


async def open_loop(client: httpx.AsyncClient, model: str, rate: float, args: argparse.Namespace) -> list[Call]:
    """Send calls at random times and wait for all of them."""
    arrivals = random.Random(args.seed)
    same = {"model": model, "max_tokens": args.max_tokens, "temperature": 0, "stream": True}
    same["stream_options"] = {"include_usage": True}
    if args.ignore_eos:
        same["ignore_eos"] = True
    tasks = []
    due = time.monotonic()
    for prompt in make_prompts(args):
        due += arrivals.expovariate(rate)
        await asyncio.sleep(max(due - time.monotonic(), 0.0))
        tasks.append(asyncio.create_task(one_call(client, {**same, "prompt": prompt})))
    return list(await asyncio.gather(*tasks))


def make_prompts(args: argparse.Namespace) -> list[str]:
    """Return a prompt of random words for each call."""
    rng = random.Random(args.seed)
    return [" ".join(rng.choices(_WORDS, k=args.prompt_words)) for _ in range(args.num_calls)]


async def one_call(client: httpx.AsyncClient, body: dict) -> Call:
    """Send one call and note when its text comes."""
    call = Call(time.monotonic())
    try:
        async with client.stream("POST", "/completions", json=body) as response:
            if response.status_code != 200:
                call.error = f"{response.status_code}: {(await response.aread())[:200]!r}"
            async for line in response.aiter_lines():
                _note(call, line)
    except httpx.HTTPError as error:
        call.error = repr(error)
    call.end = time.monotonic()
    return call


def _note(call: Call, line: str) -> None:
    """Note one line of a stream."""
    if not line.startswith("data: {"):
        return
    event = json.loads(line.removeprefix("data: "))
    if "error" in event:
        call.error = event["error"]["message"]
    elif event.get("usage"):
        call.num_tokens = event["usage"]["completion_tokens"]
    if any(choice.get("text") for choice in event.get("choices", ())):
        call.arrivals.append(time.monotonic())


_LATENCIES = ("time_to_first_token", "time_per_output_token")


def summary(rate: float, calls: list[Call]) -> dict:
    """Return throughput and percentiles of the calls at a rate."""
    done = [call for call in calls if call.error is None]
    errors = [call.error for call in calls if call.error is not None]
    if not done:
        raise ValueError(f"no call was answered; the first error: {errors[0]}")
    seconds = max(call.end for call in calls) - min(call.start for call in calls)
    row = {
        "rate": rate,
        "num_done": len(done),
        "num_failed": len(errors),
        "errors": sorted(set(errors))[:5],
        "calls_per_second": len(done) / seconds,
        "tokens_per_second": sum(call.num_tokens for call in done) / seconds,
    }
    for name in _LATENCIES:
        values = sorted(value for call in done if not math.isnan(value := getattr(call, name)))
        row[name] = {f"p{p}": percentile(values, p) for p in _PERCENTILES}
        row[name]["mean"] = statistics.fmean(values) if values else math.nan
    return row


def percentile(values: list[float], percent: float) -> float:
    """Return the value that so many percent of the sorted values do not exceed."""
    if not values:
        return math.nan
    return values[max(math.ceil(len(values) * percent / 100) - 1, 0)]


def plot(rows: list[dict], path: str) -> None:
    """Draw the percentiles over the rate."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    rates = [row["rate"] for row in rows]
    for axis, name in zip(axes, _LATENCIES, strict=False):
        for percent in _PERCENTILES:
            axis.plot(rates, [row[name][f"p{percent}"] * 1e3 for row in rows], marker="o", label=f"p{percent}")
        axis.set(title=name.replace("_", " "), xlabel="calls / s", ylabel="ms", ylim=(0, None))
        axis.legend()
    axes[2].plot(rates, [row["tokens_per_second"] for row in rows], marker="o")
    axes[2].set(title="throughput", xlabel="calls / s", ylabel="tokens / s", ylim=(0, None))
    figure.savefig(path, dpi=120)
    plt.close(figure)


# HTTP beside the engine alone


def compare_with_engine(args: argparse.Namespace) -> dict:
    """Take turns between the engine alone and clients over HTTP, on one engine; returns tokens a second of both."""
    from flax_paged import Engine, SamplingParams, load_model, load_tokenizer

    args.num_calls = args.num_clients
    prompts = make_prompts(args)
    tokenizer = load_tokenizer(args.compare_engine)
    num_tokens = [len(tokenizer.encode(prompt)) for prompt in prompts]
    engine = Engine(
        load_model(args.compare_engine),
        tokenizer,
        max_num_seqs=args.num_clients,
        max_num_batched_tokens=max(min(sum(num_tokens), 512), args.num_clients),
        max_model_len=max(num_tokens) + args.max_tokens,  # no more than is needed, for few shapes
        max_logprobs=0,
        enable_prefix_caching=False,  # or whoever comes second would find the prompts computed
    )
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens, ignore_eos=True)
    engine.warmup()  # calls that do not arrive together make steps of other shapes than the engine alone
    engine.generate(prompts, params)
    rates: dict[str, list[float]] = {"engine": [], "http": []}
    for _ in range(args.repeats):
        start = time.monotonic()
        engine.generate(prompts, params)
        rates["engine"].append(args.num_clients * args.max_tokens / (time.monotonic() - start))
        rates["http"].append(_rate_over_http(engine, args))
        print(f"engine {rates['engine'][-1]:.1f}, HTTP {rates['http'][-1]:.1f} tokens/s", flush=True)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    ratio = medians["http"] / medians["engine"]
    print(f"{args.num_clients} clients: HTTP brings {ratio:.1%} of the engine's {medians['engine']:.1f} tokens/s")
    return {"options": vars(args), "tokens_per_second": rates, "medians": medians, "ratio": ratio}


def _rate_over_http(engine, args: argparse.Namespace) -> float:
    """Serve the engine from a thread, and let this script ask for all answers at once, as a process of its own."""
    import uvicorn

    from flax_paged.serving import ServerOptions, Service, create_app, open_socket

    service = Service(ServerOptions(model_name="model"))
    service.start(engine)
    listener = open_socket("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(create_app(service), http="h11", lifespan="off", log_config=None))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        with tempfile.TemporaryDirectory() as folder:
            url, file = f"http://127.0.0.1:{listener.getsockname()[1]}", f"{folder}/result.json"
            options = ["--url", url, "--rates", "inf", "--ignore-eos", "--json-file", file, "--seed", str(args.seed)]
            for name in ("num_calls", "prompt_words", "max_tokens"):
                options += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
            subprocess.run([sys.executable, __file__, *options], check=True, stdout=subprocess.DEVNULL)
            row = json.loads(Path(file).read_text())["rates"][0]
    finally:
        server.should_exit = True
        thread.join()
        service.close()
    if row["num_failed"]:
        raise ValueError(f"{row['num_failed']} calls failed: {row['errors']}")
    return row["tokens_per_second"]


if __name__ == "__main__":
    sys.exit(main())
