"""Clock, generator, machine, configuration, errors."""

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from branchline.base.clock import ManualClock, MonotonicClock
from branchline.base.config import EngineConfig, Environment, ServerConfig
from branchline.base.errors import ConfigError, ContextLengthExceeded, InvariantBroken, RequestError, require
from branchline.base.finish import FinishReason
from branchline.base.machine import Machine
from branchline.base.rng import fresh_seed, mix64, uniform

U64 = st.integers(0, 2**64 - 1)


@given(U64, st.integers(0, 2**40))
def test_a_draw_is_a_pure_function_of_seed_and_position(seed, position):
    assert 0 <= uniform(seed, position) < 1
    assert uniform(seed, position) == uniform(seed, position)


@given(U64, U64)
def test_the_mixer_is_a_bijection(a, b):
    assert (mix64(a) == mix64(b)) == (a == b)


def test_draws_look_uniform_along_positions_and_along_seeds():
    for draws in ([uniform(7, p) for p in range(20_000)], [uniform(s, 7) for s in range(20_000)]):
        assert abs(statistics.fmean(draws) - 0.5) < 0.01
        counts = [sum(low <= d * 10 < low + 1 for d in draws) for low in range(10)]
        assert sum((count - 2000) ** 2 / 2000 for count in counts) < 33.7  # chi-square, 9 degrees of freedom, p = 1e-4
    pairs = [(uniform(7, p) - 0.5) * (uniform(7, p + 1) - 0.5) for p in range(20_000)]
    assert abs(statistics.fmean(pairs)) < 0.003


def test_known_values_stay_what_they_are():
    """Native kernels and recorded journals rely on them."""
    assert mix64(1) == 0x5692161D100B05E5
    assert uniform(0, 0) == pytest.approx(0.2818803453819423, abs=0)


def test_fresh_seeds_differ():
    assert len({fresh_seed() for _ in range(100)}) == 100


def test_clocks():
    clock = ManualClock(5)
    clock.advance(3)
    assert clock.now_ns() == 8
    with pytest.raises(ValueError, match="backwards"):
        clock.advance(-1)
    real = MonotonicClock()
    assert real.now_ns() <= real.now_ns()


@pytest.mark.parametrize("field", ["page_size", "max_running", "max_step_tokens", "pages", "waiting_timeout_s"])
@pytest.mark.parametrize("value", [0, -1, math.inf, math.nan, True])
def test_settings_out_of_range_are_refused(field, value):
    with pytest.raises(ConfigError, match=field):
        EngineConfig(**{field: value})


def test_server_settings():
    assert ServerConfig(host="127.0.0.2").is_loopback
    assert not ServerConfig(host="0.0.0.0").is_loopback
    for wrong in ({"port": 70000}, {"text_workers": 2}):
        with pytest.raises(ConfigError):
            ServerConfig(**wrong)


def test_the_environment_is_read_once_and_in_one_place():
    variables = {"HOME": "/home/x", "BRANCHLINE_API_KEYS": "a, b,,", "XDG_CACHE_HOME": "/c"}
    environment = Environment.read(variables)
    assert environment == Environment(("a", "b"), (), "/c/branchline")
    assert Environment.read({"HOME": "/home/x"}).cache_dir == "/home/x/.cache/branchline"
    assert Environment.read({"BRANCHLINE_CACHE": "/d"}).cache_dir == "/d"


def write(root, path, text):
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_the_machine_respects_its_control_group(tmp_path):
    write(tmp_path, "proc/cpuinfo", "model name\t: Fast CPU\nflags\t\t: fpu avx2 fma\nmodel name\t: Other\n")
    write(tmp_path, "proc/meminfo", "MemTotal:  8388608 kB\nMemAvailable:  4194304 kB\n")
    free = Machine.look(tmp_path)
    assert (free.cpu_model, free.flags) == ("Fast CPU", ("avx2", "fma"))
    assert (free.memory_bytes, free.available_bytes) == (8 << 30, 4 << 30)
    write(tmp_path, "sys/fs/cgroup/memory.max", str(2 << 30))
    write(tmp_path, "sys/fs/cgroup/memory.current", str(1 << 30))
    write(tmp_path, "sys/fs/cgroup/cpu.max", "100000 100000")
    bound = Machine.look(tmp_path)
    assert (bound.memory_bytes, bound.available_bytes, bound.cpus) == (2 << 30, 1 << 30, 1)
    write(tmp_path, "sys/fs/cgroup/memory.max", "max")
    write(tmp_path, "sys/fs/cgroup/cpu.max", "max 100000")
    assert Machine.look(tmp_path).memory_bytes == 8 << 30


def test_a_machine_without_files_is_unknown_not_an_error(tmp_path):
    machine = Machine.look(tmp_path)
    assert machine.cpus >= 1
    assert machine.memory_bytes == 0


def test_request_errors_carry_what_clients_read():
    error = ContextLengthExceeded(context=8192, prompt=9000)
    assert isinstance(error, RequestError)
    assert (error.status, error.kind, error.code, error.param) == (
        400, "invalid_request_error", "context_length_exceeded", "prompt",
    )  # fmt: skip
    assert "maximum context length is 8192 tokens" in error.message


def test_require_accuses_ourselves():
    require(True, "fine")
    with pytest.raises(InvariantBroken, match="wrong"):
        require(False, "wrong")


def test_only_two_reasons_are_success():
    assert [reason for reason in FinishReason if reason.is_success] == [FinishReason.STOP, FinishReason.LENGTH]
