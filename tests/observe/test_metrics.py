"""Prometheus text: the engine's photograph, what clients felt, and a fixed number of series."""

from branchline import __version__
from tests.support.asgi import run, serving


def test_metrics_after_some_traffic():
    async def go():
        async with serving() as (http, fake):
            fake.beat(running=2, pages_total=10, pages_free=4, pages_tree=6, steps=7, finished={"stop": 3, "odd": 1})
            await http.post("/v1/completions", json={"prompt": "a b", "n": 2})
            await http.post("/v1/completions", content=b"{")
            return (await http.get("/metrics")), fake

    response, _ = run(go())
    text = response.text
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    for line in (
        "branchline_running_requests 2.0",
        'branchline_pages{state="tree"} 6.0',
        "branchline_steps_total 7.0",
        'branchline_finished_requests_total{reason="stop"} 3.0',
        'branchline_choices_total{reason="stop"} 2.0',
        "branchline_time_to_first_token_seconds_count 2.0",
        "branchline_time_per_output_token_seconds_count 2.0",
        "branchline_request_output_tokens_sum 10.0",
        'branchline_http_responses_total{route="completions",status="400"} 1.0',
        'branchline_live_requests{side="http"} 0.0',
        f'branchline_build_info{{executor="fake",model="org/tiny-model",version="{__version__}"}} 1.0',
    ):
        assert line in text, line
    assert "odd" not in text


def test_series_do_not_grow_with_clients():
    async def series(http):
        text = (await http.get("/metrics")).text
        return {line.rsplit(" ", 1)[0] for line in text.splitlines() if not line.startswith("#")}

    async def go():
        async with serving() as (http, _):
            await http.post("/v1/completions", json={"prompt": "a"})
            await http.get("/metrics")
            before = await series(http)
            for i in range(50):
                await http.post(
                    f"/v1/completions?x={i}", json={"prompt": f"p{i}", "user": f"u{i}"}, headers={"x-request-id": f"r{i}"}
                )
                await http.get(f"/unknown/{i}")
            return before, await series(http)

    before, after = run(go())
    assert before == after
