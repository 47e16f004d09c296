"""Plots: that they are drawn, and that the same results give the same files. How they look, people judge."""

import xml.etree.ElementTree as ET

import pytest

from branchline.base.config import EngineConfig
from branchline.base.errors import ConfigError
from branchline.sim.latency import LatencyModel
from branchline.sim.run import simulate
from branchline.sim.synthetic import make_workload

plots = pytest.importorskip("branchline.sim.plots", exc_type=ImportError)

CPU = LatencyModel(fixed_ns=20e6, per_new_token_ns=1e6, per_context_token_ns=2_000, per_row_ns=1e6)


def run(policy="fcfs"):
    workload = make_workload("hot-cold,requests=40,rate=4,cold=0.2,prompt=64,output=4")
    return simulate(EngineConfig(policy=policy, max_running=4), workload, CPU)


def test_each_plot_is_written_as_png_and_svg_and_the_same_every_time(tmp_path):
    paths, again = (plots.draw_all({"": run()}, tmp_path / name) for name in ("one", "two"))
    assert sorted(path.name for path in paths) == [
        f"{name}.{kind}" for name in ("cache", "latency", "queue", "timeline") for kind in ("png", "svg")
    ]
    for path, other in zip(paths, again, strict=True):
        assert path.read_bytes() == other.read_bytes()
        if path.suffix == ".png":
            assert path.read_bytes().startswith(b"\x89PNG")
        else:
            ET.parse(path)


def test_runs_of_a_sweep_share_a_plot_and_are_named(tmp_path):
    paths = plots.draw_all({f"policy={name}": run(name) for name in ("fcfs", "lpm")}, tmp_path)
    assert len(paths) == 2 * (3 + 2)
    text = (tmp_path / "latency.svg").read_text()
    assert "policy=fcfs" in text
    assert "policy=lpm" in text
    assert "TTFT, cold" in text
    assert "TTFT, hot" in text


def test_a_directory_that_cannot_be_written_is_said_so(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        plots.draw_all({"": run()}, tmp_path / "file" / "plots")
