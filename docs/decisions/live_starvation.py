"""Hot and cold traffic against a live server under several policies: who waits how long for a first token?

    python docs/decisions/live_starvation.py [--seconds 60] [--load 0.95] [--policies fcfs,lpm,hrrn] [--json FILE]
    python docs/decisions/live_starvation.py --plot FILE.svg RESULT.json ...

Hot requests share one of four prefixes of 480 tokens; one request in twenty is cold: 600 tokens that nobody else sends. The
rate is measured first: how many such requests a second the server completes if it never idles; then arrivals are Poisson at
``load`` times that rate, the same arrivals for every policy. Needs the test extra (httpx comes with the openai client).
"""

import argparse
import asyncio
import json
import random
import statistics
import time

import httpx

from tests.support.server import Server

COLD_SHARE = 0.05
OPTIONS = ("--max-running", "4", "--pages", "1024", "--max-queued", "4096", "--overtake-tokens", "1024")


def requests(seed: int, count: int) -> list[tuple[bool, list[int]]]:
    """(is cold, prompt) in order of arrival."""
    rng = random.Random(seed)
    hot = [[rng.randrange(100, 40_000) for _ in range(480)] for _ in range(4)]
    made = []
    for _ in range(count):
        cold = rng.random() < COLD_SHARE
        fresh = [rng.randrange(100, 40_000) for _ in range(600 if cold else 32)]
        made.append((cold, fresh if cold else rng.choice(hot) + fresh))
    return made


async def first_token_s(client: httpx.AsyncClient, prompt: list[int]) -> float:
    started = time.perf_counter()
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "stream": True}
    first = None
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if first is None and line.startswith("data:"):
                first = time.perf_counter() - started
    return first if first is not None else float("nan")


async def capacity(url: str, seconds: float) -> float:
    """Requests a second with sixteen clients that never pause."""
    todo = iter(requests(seed=1, count=100_000))
    done, stop = 0, time.perf_counter() + seconds

    async def work(client: httpx.AsyncClient) -> None:
        nonlocal done
        while time.perf_counter() < stop:
            await first_token_s(client, next(todo)[1])
            done += 1

    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        started = time.perf_counter()
        await asyncio.gather(*(work(client) for _ in range(16)))
        return done / (time.perf_counter() - started)


async def open_loop(url: str, rate: float, seconds: float) -> dict[str, float]:
    rng = random.Random(2)
    tasks: list[tuple[bool, asyncio.Task[float]]] = []
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        stop = time.perf_counter() + seconds
        for cold, prompt in requests(seed=3, count=100_000):
            if time.perf_counter() >= stop:
                break
            tasks.append((cold, asyncio.create_task(first_token_s(client, prompt))))
            await asyncio.sleep(rng.expovariate(rate))
        waits = [(cold, await task) for cold, task in tasks]
    cold_waits = sorted(wait for cold, wait in waits if cold)
    return {
        "requests": len(waits),
        "mean_s": round(statistics.fmean(wait for _, wait in waits), 3),
        "cold_requests": len(cold_waits),
        "cold_mean_s": round(statistics.fmean(cold_waits), 3),
        "cold_max_s": round(cold_waits[-1], 3),
        "hot_mean_s": round(statistics.fmean(wait for cold, wait in waits if not cold), 3),
    }


def plot(path: str, results: list[str]) -> None:
    """Bars of earlier results, one panel for each."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "branchline"
    from matplotlib import pyplot

    figures = [("mean_s", "all, mean"), ("cold_mean_s", "cold, mean"), ("cold_max_s", "cold, longest")]
    figure, panels = pyplot.subplots(1, len(results), figsize=(4 * len(results), 3.2), squeeze=False)
    for axes, result in zip(panels[0], results, strict=True):
        with open(result) as file:
            found = json.load(file)
        policies = [name for name in found if name not in ("rate", "load")]
        for place, (key, label) in enumerate(figures):
            axes.bar([i + 0.27 * place for i in range(len(policies))], [found[p][key] for p in policies], 0.25, label=label)
        axes.set_xticks([i + 0.27 for i in range(len(policies))], policies)
        axes.set_title(f"load {found['load']:.2f}")
        axes.set_ylabel("time to first token (s)")
    panels[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--load", type=float, default=0.95)
    parser.add_argument("--policies", default="fcfs,lpm,hrrn")
    parser.add_argument("--json")
    parser.add_argument("--plot", metavar="FILE")
    parser.add_argument("results", nargs="*")
    options = parser.parse_args()
    if options.plot:
        plot(options.plot, options.results)
        return
    with Server("--policy", "fcfs", *OPTIONS) as server:
        rate = options.load * asyncio.run(capacity(server.url, 20))
    results = {"rate": rate, "load": options.load}
    for policy in options.policies.split(","):
        with Server("--policy", policy, *OPTIONS) as server:
            results[policy] = asyncio.run(open_loop(server.url, rate, options.seconds))
        print(policy, json.dumps(results[policy]), flush=True)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
